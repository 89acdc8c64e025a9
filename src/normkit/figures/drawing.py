"""Figures as the page's script draws them: plain data, and one colour for one name everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from normkit.figures.figure import Curve, Figure
from normkit.figures.values import column_texts, number_text, plain

COLOURS = 7  # in report.css, --c0 to --c6
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")


class Style(NamedTuple):
    """How a name is drawn. Names beyond the colours share one, with another symbol."""

    colour: int
    symbol: int


class Key(NamedTuple):
    """A line of a legend."""

    label: str
    style: Style
    is_published: bool
    has_range: bool
    ends: str  # where its values stop being finite


class PointTable(NamedTuple):
    """A figure's numbers: a row for each x, a column for each curve."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


def styles(figures: Sequence[Figure]) -> dict[str, Style]:
    """Give every name a style, in the order in which curves come; measured ones come first."""
    curves = [curve for figure in figures for curve in figure.curves]
    names = dict.fromkeys(curve.name for curve in sorted(curves, key=lambda curve: curve.is_published))
    return {name: Style(i % COLOURS, (i + i // COLOURS) % len(SYMBOLS)) for i, name in enumerate(names)}


def drawing(figure: Figure, style: dict[str, Style]) -> dict[str, Any]:
    """Return what the script needs of a figure."""
    return {
        "x_title": figure.x_title,
        "y_title": figure.y_title,
        "log_x": figure.log_x,
        "log_y": figure.log_y,
        "curves": [_line(c, style) for c in figure.curves],
    }


def keys(figure: Figure, style: dict[str, Style]) -> list[Key]:
    """Return the legend of a figure."""
    return [
        Key(label(curve), style[curve.name], curve.is_published, _has_range(curve), _ends(curve, figure.x_title))
        for curve in figure.curves
    ]


def label(curve: Curve) -> str:
    """Return a curve's name, with a word on what was not measured here."""
    return f"{curve.name} (published)" if curve.is_published else curve.name


def description(figure: Figure) -> str:
    """Say in words what a figure shows, for those who do not see it."""
    return f"Line chart of {figure.y_title} over {figure.x_title}. " + " ".join(map(_in_words, figure.curves))


def point_table(figure: Figure) -> PointTable:
    """Return a figure's numbers as a table."""
    points = [_points(curve) for curve in figure.curves]
    xs = sorted({x for of_curve in points for x in of_curve})
    rows = [(number_text(x), [of_curve.get(x, "") for of_curve in points]) for x in xs]
    return PointTable([label(curve) for curve in figure.curves], rows)


def _line(curve: Curve, style: dict[str, Style]) -> dict[str, Any]:
    colour, symbol = style[curve.name]
    return {
        "label": label(curve),
        "colour": colour,
        "symbol": SYMBOLS[symbol],
        "published": curve.is_published,
        "x": plain(curve.x),
        "y": plain(curve.y),
        "low": plain(curve.low),
        "high": plain(curve.high),
    }


def _has_range(curve: Curve) -> bool:
    return curve.low is not None and curve.high is not None


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _ends(curve: Curve, x_title: str) -> str:
    """Where a curve stops, which is a result."""
    finite = [i for i, value in enumerate(curve.y) if _is_finite(value)]
    if not finite:
        return "no finite value"
    if finite[-1] == len(curve.y) - 1:
        return ""
    return f"not finite from {x_title} {number_text(curve.x[finite[-1] + 1])}"


def _in_words(curve: Curve) -> str:
    finite = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if _is_finite(y)]
    if not finite:
        return f"{label(curve)}: no finite value."
    (x0, y0), (x1, y1) = finite[0], finite[-1]
    return f"{label(curve)}: from {number_text(y0)} at {number_text(x0)} to {number_text(y1)} at {number_text(x1)}."


def _points(curve: Curve) -> dict[float, str]:
    """Values by x, each with its range where there is one, all with the same decimals."""
    low, high = (curve.low, curve.high) if curve.low is not None and curve.high is not None else ((), ())
    texts = iter(column_texts([*curve.y, *low, *high]))
    y_texts, *ranges = ([next(texts) for _ in values] for values in (curve.y, low, high))
    if not low:
        return dict(zip(curve.x, y_texts, strict=True))
    rows = zip(curve.x, curve.y, y_texts, *ranges, strict=True)
    return {x: f"{text} ({least} to {most})" if _is_finite(y) else text for x, y, text, least, most in rows}
