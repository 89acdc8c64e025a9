"""What only reports need is imported when a report is written, and missed in words."""

from __future__ import annotations

import importlib
from typing import Any

from normkit.errors import NormkitError


class MissingExtraError(NormkitError, ImportError):
    """A package of the extra `lab` that is not installed."""


def required(module: str) -> Any:
    """Import a module of the extra `lab`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"A report needs {package}, which cannot be imported: {error}. Install it: pip install 'normkit[lab]'."
        ) from error
