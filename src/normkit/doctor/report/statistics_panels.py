"""Stored statistics against the data's own, channel by channel: two small charts for each layer.

A point is a channel; where both statistics are equal it lies on the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from normkit.figures.scale import is_shown, scale_of
from normkit.figures.values import number_text

SIDE = 100.0  # of a chart, in its own units
FAR = 0.5  # standard deviations of the data: beyond it a channel is drawn as wrong, which is NK102's threshold
_STEP = 0.5  # channels that are closer than this on the chart are one point
_EPS = 1e-5  # of a layer whose own is not known: what a layer divides by, and distances with it, is never zero

Pair = tuple[float, float]  # measured, stored


class Panel(NamedTuple):
    """A chart.

    Attributes:
        title: which statistic it shows.
        near: the points of channels that agree, as the path of an SVG; `far`, those that do not.
        far: see `near`.
        low: the text at the lower ends of both axes; `high`, at the upper ends.
        high: see `low`.
        summary: how far the worst channel is off, and which could not be drawn.
        description: the chart in words.
    """

    title: str
    near: str
    far: str
    low: str
    high: str
    summary: str
    description: str


def panels(layer: Mapping[str, Any]) -> list[Panel]:
    """Charts of means and standard deviations; none for a layer that stores nothing or was not measured."""
    stored_var, data_var = _numbers(layer.get("stored_var")), _numbers(layer.get("data_var"))
    if not stored_var or len(stored_var) != len(data_var):
        return []
    found = []
    unit = [_root(var + (layer.get("eps") or _EPS)) for var in data_var]
    stored_mean, data_mean = _numbers(layer.get("stored_mean")), _numbers(layer.get("data_mean"))
    if len(stored_mean) == len(data_mean) == len(unit):
        found.append(_panel("mean", list(zip(data_mean, stored_mean, strict=True)), unit, is_log=False))
    deviations = list(zip(map(_root, data_var), map(_root, stored_var), strict=True))
    return [*found, _panel("standard deviation", deviations, unit, is_log=True)]


def _panel(title: str, pairs: Sequence[Pair], unit: Sequence[float], is_log: bool) -> Panel:
    shown = [(pair, size) for pair, size in zip(pairs, unit, strict=True) if all(is_shown(v, is_log) for v in pair)]
    scale = scale_of([value for pair, _ in shown for value in pair], is_log, margin=0.06)
    off = [(pair, _distance(pair, size)) for pair, size in shown]
    hidden = len(pairs) - len(shown)
    worst = max((distance for _, distance in off), default=0.0)
    summary = _summary(worst, hidden, bool(shown))
    return Panel(
        title,
        near=_path((pair for pair, distance in off if distance <= FAR), scale.place),
        far=_path((pair for pair, distance in off if distance > FAR), scale.place),
        low=_end(scale.low) if shown else "",
        high=_end(scale.high) if shown else "",
        summary=summary,
        description=f"Stored against measured {title} of {len(pairs)} channels: {summary}",
    )


def _distance(pair: Pair, unit: float) -> float:
    """How far the stored statistic is off, in standard deviations of the data."""
    distance = abs(pair[1] - pair[0]) / unit
    return math.inf if math.isnan(distance) else distance


def _path(pairs: Iterable[Pair], place: Callable[[float], float]) -> str:
    """Dots, as lines of no length with round ends: a layer may have thousands."""
    at = {(_grid(place(x)), _grid(1 - place(y))): None for x, y in pairs}
    return "".join(f"M{x:g} {y:g}h0" for x, y in at)


def _grid(part: float) -> float:
    return round(SIDE * part / _STEP) * _STEP


def _summary(worst: float, hidden: int, has_points: bool) -> str:
    if not has_points:
        return "no channel can be drawn: all are zero, negative or not finite"
    off = f"off by at most {worst:.2g} σ"  # noqa: RUF001, the letter
    return off if not hidden else f"{off}; {hidden} not drawn: zero, negative or not finite"


def _end(value: float) -> str:
    return number_text(float(f"{value:.2g}"))


def _numbers(values: Any) -> list[float]:
    return [] if values is None else [math.nan if value is None else float(value) for value in values]


def _root(variance: float) -> float:
    return math.sqrt(variance) if variance >= 0 else math.nan
