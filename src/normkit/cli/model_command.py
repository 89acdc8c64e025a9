"""What the commands that change a model share: read it, change it, write it, and say what was done."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from torch import nn

from normkit.cli.surgery_tables import as_document, print_surgery
from normkit.cli.target import find_model
from normkit.errors import ArgumentError, NormkitError, NormkitWarning
from normkit.lab.bar import shown_bar
from normkit.surgery.checkpoint import load, save
from normkit.surgery.checkpoint.file import read_manifest
from normkit.surgery.norms import norms
from normkit.surgery.parity import tolerance
from normkit.surgery.result import Surgery


class ModelOptions(NamedTuple):
    """The options that all of these commands have."""

    target: str
    checkpoint: Path | None
    strict: bool
    out: Path | None
    dry_run: bool
    format: str


def operate(name: str, verb: Callable[[nn.Module], Surgery], task: ModelOptions, keeps_function: bool = False) -> None:
    """Do it, write the model, and print the table; exit with 1 if outputs moved that should not have."""
    _check_out(task)
    with redirect_stdout(sys.stderr), in_words():  # the output of a user's module is not part of ours
        model = find_model(task.target)
        if task.checkpoint is not None:
            fill(model, task.checkpoint, task.strict)
        with said_warnings():
            surgery = verb(model)
        out = None if task.dry_run else task.out
        if out is not None:
            save(surgery.model, out)
            say(f"written: {out}")
    if task.format == "json":
        written = None if out is None else str(out)
        print(json.dumps({"command": name, "target": task.target, **as_document(surgery), "out": written}, indent=2))
    else:
        print_surgery(surgery)
    if keeps_function and surgery.parity is not None and not surgery.parity.max_rel <= tolerance(surgery.model):
        say(f"outputs moved by more than {tolerance(surgery.model):.0e} of the largest, which {name} should not do.")
        raise typer.Exit(1)


def say(message: str) -> None:
    """Print a message to stderr."""
    print(f"normkit: {message}", file=sys.stderr)


@contextmanager
def said_warnings() -> Iterator[None]:
    """Print our own warnings as messages."""
    show = warnings.showwarning

    def said(message: Warning | str, *where: Any, **more: Any) -> None:
        say(str(message)) if isinstance(message, NormkitWarning) else show(message, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", NormkitWarning)
        warnings.showwarning = said
        yield


@contextmanager
def shown_progress(batches: object) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere. What has no length has no end."""
    total = len(batches) if isinstance(batches, Sized) else None
    with shown_bar("batches", total, Console(stderr=True)) as show:
        yield show


def _check_out(task: ModelOptions) -> None:
    """Refuse an --out that cannot be written before the work, not after it."""
    if task.dry_run:
        return
    if task.out is None:
        raise ArgumentError("--out FILE is needed, to write the model to; --dry-run writes nothing.")
    if task.out.is_dir() or not task.out.absolute().parent.is_dir():
        what = "is a folder" if task.out.is_dir() else f"has no folder: make {task.out.absolute().parent} first"
        raise ArgumentError(f"--out must be a file that can be written; {task.out} {what}.")


def fill(model: nn.Module, checkpoint: Path, strict: bool) -> None:
    """Load a checkpoint; warnings are printed as messages."""
    _take_modes(model, read_manifest(checkpoint))
    with said_warnings():
        try:
            load(model, checkpoint, strict=strict)
        except NormkitError as error:
            raise NormkitError(str(error).replace("strict=False", "--no-strict")) from error


def _take_modes(model: nn.Module, manifest: dict[str, Any] | None) -> None:
    """Put norms into the modes of the file: the model was just made, in training mode."""
    saved = {} if manifest is None else manifest["norms"]
    for name, layer, _ in norms(model):
        if name in saved:
            layer.training = saved[name]["mode"] == "train"


@contextmanager
def in_words() -> Iterator[None]:
    """Show an error of the user's code with its traceback, and exit with 2."""
    try:
        yield
    except NormkitError:
        raise
    except Exception as error:
        traceback.print_exc()
        say(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
