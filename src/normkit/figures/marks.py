"""Lines and symbols, as points: those of the report, for what is drawn without a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from normkit.figures.drawing import SYMBOLS

Point = tuple[float, float]


def _star(points: int, inner: float) -> list[Point]:
    """A star that points up, its tips at a distance of one."""
    turns = (math.pi * i / points for i in range(2 * points))
    return [
        ((inner if i % 2 else 1.0) * math.sin(t), -(inner if i % 2 else 1.0) * math.cos(t)) for i, t in enumerate(turns)
    ]


def _turned(shape: Sequence[Point]) -> list[Point]:
    """A shape after an eighth of a turn."""
    half = math.sqrt(0.5)
    return [(half * (x - y), half * (x + y)) for x, y in shape]


_ARM, _END = 0.32, 0.95
_CROSS: list[Point] = [
    (-_ARM, -_END), (_ARM, -_END), (_ARM, -_ARM), (_END, -_ARM), (_END, _ARM), (_ARM, _ARM),
    (_ARM, _END), (-_ARM, _END), (-_ARM, _ARM), (-_END, _ARM), (-_END, -_ARM), (-_ARM, -_ARM),
]  # fmt: skip
_SHAPES: dict[str, list[Point]] = {
    "circle": [(0.85 * math.cos(math.pi * i / 12), 0.85 * math.sin(math.pi * i / 12)) for i in range(24)],
    "square": [(-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)],
    "diamond": [(0.0, -1.05), (1.05, 0.0), (0.0, 1.05), (-1.05, 0.0)],
    "triangle-up": [(0.0, -1.0), (0.95, 0.7), (-0.95, 0.7)],
    "cross": _CROSS,
    "x": _turned(_CROSS),
    "star": _star(5, 0.45),
}


def symbol_shape(symbol: int, at: Point, radius: float) -> list[Point]:
    """The outline of a symbol, by its place in drawing.SYMBOLS."""
    return [(at[0] + radius * x, at[1] + radius * y) for x, y in _SHAPES[SYMBOLS[symbol]]]


def dashes(points: Sequence[Point], on: float, off: float) -> Iterator[list[Point]]:
    """A line through points, cut into dashes of one length with gaps of another."""
    done = 0.0
    for a, b in pairwise(points):
        size = math.dist(a, b)
        first, last = math.floor(done / (on + off)), math.floor((done + size) / (on + off))
        for start in (k * (on + off) - done for k in range(first, last + 1)):
            ends = max(0.0, start), min(size, start + on)
            if ends[0] < ends[1]:
                yield [_between(a, b, end / size) for end in ends]
        done += size


def _between(a: Point, b: Point, part: float) -> Point:
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])
