"""A number that cases have in common: its geometric mean, the worst of them, and what is wanted of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from normkit.bench.case import Result

Number = Callable[[Result], float | None]  # None where the contestant did not run
Better = Literal["more", "less"]
Of = Literal["mean", "worst"]


@dataclass(frozen=True)
class Wanted:
    """What a figure is to reach: its geometric mean, or every one of its cases and so the worst."""

    value: float
    of: Of = "mean"


@dataclass(frozen=True)
class SummaryFigure:
    """A number that some of the cases have, for which of them, and what is wanted of it."""

    name: str
    selects: Callable[[Result], bool]
    ours: Number
    eager: Number | None = None  # torch's own number, where it is not 1 by definition
    better: Better = "more"
    wanted: Wanted | None = None


@dataclass(frozen=True)
class SummaryRow:
    """A figure with one number of threads: the geometric mean over its cases, and the worst of them."""

    figure: str
    threads: int
    cases: int
    value: float
    worst: float
    worst_case: str
    eager: float
    better: Better
    wanted: float | None = None
    wanted_of: Of = "mean"
    reached: bool | None = None  # None where nothing is wanted


def row(figure: SummaryFigure, threads: int, results: Iterable[Result]) -> SummaryRow | None:
    """Return the figure of those of the results that it selects; None if it has none of them."""
    measured = [(value, r) for r in results if figure.selects(r) and (value := figure.ours(r)) is not None]
    if not measured:
        return None
    values = [value for value, _ in measured]
    mean, worst = statistics.geometric_mean(values), min(values) if figure.better == "more" else max(values)
    eager = [1.0] if figure.eager is None else [value for _, r in measured if (value := figure.eager(r)) is not None]
    worst_case = measured[values.index(worst)][1]
    found = SummaryRow(
        figure.name,
        threads,
        len(values),
        mean,
        worst,
        worst_case.name,
        statistics.geometric_mean(eager) if eager else float("nan"),
        figure.better,
    )
    return found if figure.wanted is None else _judged(found, figure.wanted)


def _judged(row: SummaryRow, wanted: Wanted) -> SummaryRow:
    value = row.value if wanted.of == "mean" else row.worst
    reached = value >= wanted.value if row.better == "more" else value <= wanted.value
    return replace(row, wanted=wanted.value, wanted_of=wanted.of, reached=reached)
