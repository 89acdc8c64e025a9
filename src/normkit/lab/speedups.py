"""How many times fewer steps one net takes than another to the other's best accuracy, and what to say of such factors.

A factor is infinite if only the first net trains, 0 if it never comes to that accuracy, None if neither trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from normkit.lab.probed import known
from normkit.lab.record import TrialRecord
from normkit.lab.summaries import best, steps_to, with_range

TRAINS = 0.3  # of test images


def trains(trial: TrialRecord) -> bool:
    """Whether three accuracies that were measured in a row are well above chance, in their median."""
    values = trial.series("accuracy")[1]
    return any(median(values[i : i + 3]) >= TRAINS for i in range(len(values) - 2))


def times_fewer(mine: TrialRecord, theirs: TrialRecord, below: float = 0.0) -> float | None:
    """How many times fewer steps the first trial takes to the best accuracy of the second, less `below`."""
    if not trains(theirs):
        return math.inf if trains(mine) else None
    level = best(theirs) - below
    first, second = steps_to(mine, level), steps_to(theirs, level)
    return second / first if first and second else 0.0


def exceeds(one: float | None, other: float | None) -> bool | None:
    """Whether a factor is larger than another; None if one is missing or both are infinite."""
    if one is None or other is None or (math.isinf(one) and math.isinf(other)):
        return None
    return one > other


def most(answers: Sequence[bool | None]) -> bool | None:
    """What most of those say that say something; None if they are evenly divided."""
    yes, no = answers.count(True), answers.count(False)
    return None if yes == no else yes > no


def numbers(factors: Iterable[float | None]) -> list[float]:
    """The factors that are numbers of times."""
    return [factor for factor in known([*factors]) if 0 < factor < math.inf]


def shown(factors: Iterable[float | None], of: str) -> str:
    """Factors that are numbers by their median and range; the others in words, in which the first net has a name."""
    found = [*factors]
    words = {f"only {of} trains": math.inf, f"never with {of}": 0.0, "neither trains": None}
    said = [with_range(numbers(found), 1)] if numbers(found) else []
    for word, factor in words.items():
        if count := found.count(factor):
            said.append(word if count == len(found) else f"{word} in {count} of {len(found)}")
    return "; ".join(said) or "-"
