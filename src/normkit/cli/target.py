"""Targets, `module:attribute` or `path.py:attribute`: where a model, an example, batches or a function is found."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from normkit.errors import NormkitError, did_you_mean

_FORM = "module:attribute or path.py:attribute"


class TargetError(NormkitError, ValueError):
    """A target that cannot be found, or is of the wrong kind."""


def find_model(target: str) -> nn.Module:
    """The model that a target is, or that a function or class of no arguments makes."""
    found: nn.Module = _made(target, nn.Module, "a torch.nn.Module, or a function without arguments that returns one")
    return found


def find_example(target: str) -> Any:
    """A batch: a tensor, a tuple or list that begins with one, or a dictionary; or a function that returns it."""
    return _made(target, (Tensor, list, tuple, dict), "a tensor, a tuple, a list or a dictionary, or a function of one")


def find_batches(target: str) -> Iterable[Any]:
    """Batches: a list, a DataLoader or another iterable; or a function that returns them."""
    found: Iterable[Any] = _made(target, Iterable, "an iterable of batches, or a function without arguments of one")
    if isinstance(found, Tensor | dict | str):
        raise TargetError(f"{target} must be an iterable of batches; got a {type(found).__name__}. Make it a list.")
    return found


def find_function(target: str) -> Callable[..., Any]:
    """A function, as it is."""
    found: Callable[..., Any] = _attribute(target)
    if not callable(found):
        raise TargetError(f"{target} must be a function; got a {type(found).__name__}. Name a function.")
    return found


def file_of(target: str) -> str | None:
    """The file of a target that was found; None if its module is in no file."""
    source = target.rpartition(":")[0]
    return source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)


def _made(target: str, kind: Any, what: str) -> Any:
    """The attribute itself if it is of this kind, or else what it returns when it is called."""
    found = _attribute(target)
    if callable(found) and (isinstance(found, type) or not isinstance(found, kind)):
        try:
            found = found()
        except Exception as error:
            raise TargetError(f"{target} must be {what}; calling it raised {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise TargetError(f"{target} must be {what}; got a {type(found).__name__}. Name another attribute.")
    return found


def _attribute(target: str) -> Any:
    source, colon, path = target.rpartition(":")
    if not colon or not source or not path:
        raise TargetError(f"a target must be {_FORM}; got {target!r}.")
    found: Any = _imported(source, target)
    for name in path.split("."):
        if not hasattr(found, name):
            known = [other for other in dir(found) if not other.startswith("__")]
            raise TargetError(f"{source} has no attribute {path!r}.{did_you_mean(name, known)}")
        found = getattr(found, name)
    return found


def _imported(source: str, target: str) -> ModuleType:
    try:
        return _from_file(Path(source)) if source.endswith(".py") else _from_name(source)
    except TargetError:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit()
        raise TargetError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error


def _from_name(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; what is missing is something that it imports
        raise TargetError(
            f"there is no module {error.name!r} in this folder or among the installed ones. A target is {_FORM}; for "
            "a file, write its name with .py."
        ) from error


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(f"there is no file {path}.{did_you_mean(path.name, others)}")
    for module in list(sys.modules.values()):  # a model and an example may be in one file, which is run once
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
    assert spec is not None  # a name that ends in .py always has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if os.fspath(folder) not in sys.path:
        sys.path.insert(0, os.fspath(folder))
