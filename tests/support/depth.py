"""How much of a table the ordinary run takes. `pytest --deep` takes all of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def thinned(rows: Iterable[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """All rows as parameters, those that the ordinary run leaves out marked as deep."""
    return [row if is_kept(row) else pytest.param(row, marks=pytest.mark.deep) for row in rows]


def first_of_each(rows: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """`thinned` to the first row of each kind."""
    rows = list(rows)
    first: dict[Hashable, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(kind(row), index)
    kept = {id(rows[index]) for index in first.values()}
    return thinned(rows, lambda row: id(row) in kept)
