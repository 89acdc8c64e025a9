"""The statistics of a benchmark: what happened over the rounds, as a median with its quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of what was measured over the rounds, between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return quartiles that lie inside what was measured, also with few rounds."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(theirs: Iterable[float], ours: Iterable[float]) -> Spread:
    """Return the spread of the rounds' own ratios.

    What disturbs a machine lasts longer than a round, so that it cancels in each, and would not between two medians.
    """
    return Spread.of(t / o for t, o in zip(theirs, ours, strict=True))
