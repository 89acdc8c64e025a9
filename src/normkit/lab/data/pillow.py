"""Pillow, which only images in files need."""

from __future__ import annotations

from typing import Any

from normkit.optional import required


def pillow() -> Any:
    """The package `PIL` with its module `Image`, or an error that says how to install it."""
    required("PIL.Image", "Reading image files", "Pillow")
    return required("PIL", "Reading image files", "Pillow")
