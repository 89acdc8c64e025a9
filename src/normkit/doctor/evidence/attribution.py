"""Whose statistics the train/eval gap comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from normkit.batches import in_evaluation
from normkit.doctor.evidence.measure import Measure
from normkit.doctor.evidence.over_ranks import mean_of
from normkit.doctor.evidence.runs import Runs
from normkit.moments import Moments
from normkit.surgery.norms import Norm
from normkit.surgery.statistics.collect import as_if_stored, own_statistics_back

# Layers whose stored statistics are less than this many standard deviations off are exchanged together, not one by one.
SUSPICIOUS = 0.1
MOST_SUSPECTS = 64
_FORWARDS = 160  # on one batch each: with many suspects, fewer batches


class Share(NamedTuple):
    """The part of the gap that goes when a layer's stored statistics are exchanged for the data's own.

    Attributes:
        alone: when they are the first to be exchanged.
        in_order: when those of all layers before it, in the order they run, are exchanged already.
        share: the mean of the parts it has when layers are exchanged in their order and in the reverse order, so that a
            layer whose fault hides another's is not the only one to blame; as a part of what all layers recover that
            recover something.
    """

    alone: float
    in_order: float
    share: float


@contextmanager
def exchanged(norms: Iterable[Norm], population: Mapping[str, Moments]) -> Iterator[None]:
    """Let norms normalize with these statistics, in evaluation, inside the block."""
    norms = list(norms)
    with own_statistics_back(norms):
        for norm in norms:
            as_if_stored(norm.layer, population[norm.name])
        yield


def mean_reading(runs: Runs, measure: Measure, which: Iterable[int] | None = None) -> float:
    """The mean of a measure over the batches, in evaluation."""
    readings: list[float] = []
    with in_evaluation(runs.model):
        runs(lambda index, output: readings.append(measure(index, output)), which)
    return sum(readings) / len(readings) if readings else float("nan")


class Attribution:
    """Exchanges the statistics of sets of layers, and measures what each set recovers."""

    def __init__(
        self, runs: Runs, measure: Measure, norms: Sequence[Norm], population: Mapping[str, Moments], suspects: int
    ) -> None:
        self._runs, self._measure, self._norms, self._population = runs, measure, norms, population
        self._which = runs.left[: max(1, _FORWARDS // (3 * suspects + 2))]
        self._known: dict[frozenset[str], float] = {}

    def level(self, names: Iterable[str]) -> float:
        """The measure when these layers have the statistics of the data."""
        key = frozenset(names)
        if key not in self._known:
            with exchanged([norm for norm in self._norms if norm.name in key], self._population):
                self._known[key] = mean_of(mean_reading(self._runs, self._measure, self._which))
        return self._known[key]

    def parts(self, order: Sequence[str], base: frozenset[str]) -> dict[str, float]:
        """How much each layer recovers after those before it, and after those of `base`."""
        found, done = {}, set(base)
        for name in order:
            before = self.level(done)
            done.add(name)
            found[name] = before - self.level(done)
        return found


def attribute(
    runs: Runs,
    measure: Measure,
    norms: Sequence[Norm],
    population: Mapping[str, Moments],
    distance: Callable[[str], float],
) -> dict[str, Share]:
    """Share out the gap over the layers, which are in the order they run; nothing if there is no gap.

    Layers whose statistics are near the data's are exchanged first and together, and have no share of their own.
    """
    by_distance = sorted((norm.name for norm in norms), key=distance, reverse=True)
    suspects = {name for name in by_distance[:MOST_SUSPECTS] if distance(name) > SUSPICIOUS}
    if not suspects:
        return {}
    order = [norm.name for norm in norms if norm.name in suspects]
    rest = frozenset(norm.name for norm in norms) - suspects
    work = Attribution(runs, measure, norms, population, len(suspects))
    whole = work.level(()) - work.level([norm.name for norm in norms])
    if not 0 < whole < math.inf:
        return {}
    on, back = work.parts(order, rest), work.parts(order[::-1], rest)
    alone = {name: work.level(rest) - work.level({*rest, name}) for name in order}
    both = {name: max(on[name] + back[name], 0.0) for name in order}
    total = max(sum(both.values()), 2 * whole)
    return {name: Share(alone[name] / whole, on[name] / whole, both[name] / total) for name in order}
