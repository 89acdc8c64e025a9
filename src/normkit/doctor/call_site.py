"""Which line of the user's code a forward belongs to, and which module was called there."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch
from torch import nn

Owner = Literal["torch", "normkit", "library", "user"]

_MODULE_CALL = nn.Module._call_impl.__code__
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_NORMKIT = f"{Path(__file__).parents[1]}{os.sep}"
_MEASURES = tuple(f"{_NORMKIT}{part}{os.sep}" for part in ("surgery", "doctor", "instruments"))
_INSTALLED = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_FOLDERS = ("site-packages", "dist-packages")


class CallSite(NamedTuple):
    """A line that called a model.

    Attributes:
        file: where the line is; None if no line could be seen, as in a thread that only runs a backward.
        line: its number.
        root: the class of the outermost module that was called there.
        is_normkits: whether normkit itself made the call, to measure something, on the user's behalf.
    """

    file: str | None
    line: int | None
    root: str
    is_normkits: bool = False

    def __str__(self) -> str:
        return "an unknown line" if self.file is None else f"{self.file}:{self.line}"


def call_site() -> CallSite:
    """The call that the forward now running belongs to."""
    calls = [frame for frame in _outward(sys._getframe(1)) if frame.f_code is _MODULE_CALL]
    if not calls:
        return CallSite(None, None, "")
    root = type(calls[-1].f_locals["self"]).__name__
    direct = next((frame for frame in _outward(calls[-1]) if _owner(frame) != "torch"), None)
    is_normkits = direct is not None and direct.f_code.co_filename.startswith(_MEASURES)
    frame = _frame_of_user(calls)
    if frame is None:
        return CallSite(None, None, root, is_normkits)
    return CallSite(frame.f_code.co_filename, frame.f_lineno, root, is_normkits)


def _frame_of_user(calls: Sequence[FrameType]) -> FrameType | None:
    """Whoever called the outermost module. Where that is a framework's loop, the user's own code, near the call if any.

    Frameworks call a user's training step, which calls a module; or they call the module themselves.
    """
    caller = _caller(calls[-1])
    if caller is None or _owner(caller) == "user":
        return caller
    callers = [_caller(call) for call in reversed(calls)]
    frames = [frame for frame in (*callers, *_outward(calls[-1])) if frame is not None]
    return next((frame for frame in frames if _owner(frame) == "user"), caller)


def _caller(call: FrameType) -> FrameType | None:
    """The nearest frame around a call that is neither torch's nor ours."""
    return next((frame for frame in _outward(call) if _owner(frame) not in ("torch", "normkit")), None)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> Owner:
    return _owner_of(frame.f_code.co_filename)


@cache
def _owner_of(file: str) -> Owner:
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith(_NORMKIT):
        return "normkit"
    is_installed = file.startswith(_INSTALLED) or any(folder in file for folder in _FOLDERS)
    return "library" if is_installed else "user"
