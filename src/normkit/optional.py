"""Packages of optional extras: imported where they are used, with an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from normkit.errors import MissingExtraError


def required(module: str, what: str, package: str | None = None, extra: str = "lab") -> Any:
    """Import a module of an optional extra, or raise an error saying that `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {name}, which cannot be imported: {error}. Install it: pip install 'normkit[{extra}]'."
        ) from error
