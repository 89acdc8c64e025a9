"""Pillow, which only images in files need."""

from __future__ import annotations

from types import ModuleType

from normkit.lab.data.images import DataError


def pillow() -> ModuleType:
    """The package `PIL` with its module `Image`, or an error that says how to install it."""
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError(
            f"Reading image files needs Pillow; it cannot be imported ({error}). Run: pip install 'normkit[lab]'"
        ) from error
    return PIL
