"""Summaries of what trials measured, over seeds: medians, ranges, curves and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from normkit.figures.figure import Curve, Figure
from normkit.lab.experiment import Arm
from normkit.lab.findings import Outcome
from normkit.lab.record import Run, TrialRecord


def is_complete(run: Run, arms: Sequence[Arm]) -> bool:
    """Whether every arm has ended with every seed of the run."""
    seeds = {trial.seed for trial in run.trials}
    return len(run.trials) == len(seeds) * len(arms) and all(trial.end for trial in run.trials)


def verdict(
    holds: Sequence[bool | None],
    complete: bool,
    *,
    also: Sequence[bool | None] = (),
    contradicted_by: Literal["all", "any"] = "all",
) -> Outcome:
    """Judge a claim by whether each of its parts holds; None is a part that remains open.

    Supported: all parts hold, and so do those of `also`, which support needs but which cannot contradict. Contradicted:
    all parts fail, or any of them does. A run that is not complete is unclear.
    """
    if not complete or not holds:
        return "unclear"
    if all(holds) and all(also):
        return "supported"
    fails = [part is False for part in holds]
    return "contradicted" if (all(fails) if contradicted_by == "all" else any(fails)) else "unclear"


def steps_to(trial: TrialRecord, level: float, key: str = "accuracy") -> float | None:
    """The first step at which a trial measured at least this level; None if it never did."""
    steps, values = trial.series(key)
    return next((step for step, value in zip(steps, values, strict=True) if value >= level), None)


def best(trial: TrialRecord, key: str = "accuracy") -> float:
    """The highest value that a trial measured."""
    return max(trial.series(key)[1], default=float("nan"))


def last(trial: TrialRecord, key: str = "accuracy") -> float:
    """The last value that a trial measured."""
    values = trial.series(key)[1]
    return values[-1] if values else float("nan")


def late_gain(trial: TrialRecord) -> float:
    """How much higher a trial's best accuracy is than it was before the last quarter of its steps: 0 on a plateau."""
    steps, values = trial.series("accuracy")
    early = [value for step, value in zip(steps, values, strict=True) if step <= 0.75 * steps[-1]]
    return best(trial) - max(early, default=0.0)


def with_range(values: Sequence[float | None], digits: int = 0, never: float = math.inf) -> str:
    """The median over seeds, with the range if there are several; a dash if there are none.

    None is a seed that never reached the level. In the median it counts as `never`: as infinity among numbers of steps,
    of which fewer are better, and as minus infinity among speed-ups, of which more are better.
    """
    reached = [value for value in values if value is not None]
    if not reached:
        return "never" if values else "-"
    missing = f", {len(values) - len(reached)} never" if len(reached) < len(values) else ""
    found = median(never if value is None else value for value in values)
    middle, low, high = (f"{value:,.{digits}f}" for value in (found, min(reached), max(reached)))
    middle = middle if math.isfinite(found) else "never"
    return middle if len(values) == 1 else f"{middle} ({low} to {high}{missing})"


def middle(values: Sequence[float | None]) -> float | None:
    """The median, with None counted as infinity; None if the median is infinite."""
    order = sorted(float("inf") if value is None else value for value in values)
    found = median(order) if order else float("inf")
    return None if found == float("inf") else found


def curve_over_seeds(name: str, trials: Sequence[TrialRecord], key: str = "accuracy", x: str = "step") -> Curve:
    """The median of several trials, with their range, at the steps at which all of them measured."""
    points = [{line["step"]: line for line in trial.measured if line.get(key) is not None} for trial in trials]
    steps = sorted(set.intersection(*(set(of) for of in points))) if points else []
    rows = [[of[step] for of in points] for step in steps]
    values = [[float(line[key]) for line in row] for row in rows]
    return Curve(
        name,
        [median(float(line[x]) for line in row) for row in rows],
        [median(row) for row in values],
        low=[min(row) for row in values] if len(trials) > 1 else None,
        high=[max(row) for row in values] if len(trials) > 1 else None,
    )


def curve_of_medians(name: str, found: Iterable[tuple[float, Sequence[float]]]) -> Curve:
    """The median of the values that were found at each place, with their range; places without values are left out."""
    points = [(x, values) for x, values in found if values]
    low, high = ([end(values) for _, values in points] for end in (min, max))
    medians = [median(values) for _, values in points]
    has_range = any(len(values) > 1 for _, values in points)
    return Curve(name, [x for x, _ in points], medians, *((low, high) if has_range else ()))


def accuracy_figures(arms: Mapping[str, Sequence[TrialRecord]], published: Sequence[Curve] = ()) -> list[Figure]:
    """Accuracy over all of the training, close up where it is near the highest, and against time."""
    curves, timed = ([curve_over_seeds(arm, of, x=x) for arm, of in arms.items()] for x in ("step", "seconds"))
    curves += published
    floor = 0.93 * max((value for curve in curves for value in curve.y), default=0.0)
    close = [high for curve in curves if (high := curve.above(floor)).y]
    note, axes = "Median and range over seeds.", ("steps", "accuracy")
    return [
        Figure("Test accuracy", *axes, curves, note),
        Figure("Test accuracy, close up", *axes, close, note),
        Figure("Test accuracy against time", "seconds of training", "accuracy", timed, note),
    ]
