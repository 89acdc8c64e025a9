"""What only some of the lab needs is imported when it is needed, and missed in words."""

from __future__ import annotations

import importlib
from typing import Any

from normkit.errors import MissingExtraError


def required(module: str, what: str, package: str | None = None) -> Any:
    """Import a module of the extra `lab`; `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {name}, which cannot be imported: {error}. Install it: pip install 'normkit[lab]'."
        ) from error
