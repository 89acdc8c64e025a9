"""Functions of single values in the place of norms."""

from __future__ import annotations

from typing import Any

import normkit as nk
from support.case import Case
from support.formulas import pointwise

FORMULAS = {"DynamicTanh": pointwise.dynamic_tanh, "Derf": pointwise.derf}


def row(name: str, shape: tuple[int, ...], args: tuple[Any, ...], option: str = "", *, free: Any, **options: Any):
    cls = getattr(nk, name)
    return Case(name, lambda: cls(*args, **options), shape, FORMULAS[name], option=option, free=free)


ROWS = [
    row("DynamicTanh", (4, 6, 7), (7,), free=(0, 1)),
    row("DynamicTanh", (4, 5, 6, 7), (5, False), "maps", free=(0, 2, 3)),
    row("DynamicTanh", (3, 4, 5, 6), ([5, 6],), "example", free=(0, 1), activation="relu"),
    row("Derf", (4, 6, 7), (7,), free=(0, 1)),
    row("Derf", (4, 5, 6, 7), (5, False), "maps", free=(0, 2, 3), activation="silu"),
]
