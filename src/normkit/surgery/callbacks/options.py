"""Checks of what callbacks take."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.errors import ArgumentError
from normkit.surgery.selection import Patterns


def kept(patterns: Patterns | None) -> Patterns | None:
    """Patterns that can be used more than once."""
    return tuple(patterns) if isinstance(patterns, Iterator) else patterns


def must_count(name: str, value: object, what: str, least: int = 1) -> None:
    """Check a whole number, which is not below `least`; `what` says in the error what it stands for."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be {what} {least}; got {value!r}.")
