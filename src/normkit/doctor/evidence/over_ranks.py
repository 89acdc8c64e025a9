"""The evidence of one rank beside that of the others: moments merged with their counts, measures averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from normkit.doctor.evidence.measure import Gap
from normkit.doctor.evidence.statistics import Call, LayerStatistics
from normkit.finding import Finding
from normkit.moments import Moments
from normkit.named_layers import named_layers
from normkit.ranks import gathered, named_ranks, world_size
from normkit.surgery.norms import Norm

T = TypeVar("T")

EXAMINE = "examine"
_Part = tuple[Moments | None, int | None, list[Call]]


@contextmanager
def without_gradient_exchange(model: nn.Module) -> Iterator[None]:
    """Keep DistributedDataParallel from preparing to sum gradients: the forwards here are followed by no backward.

    The caller restores the model.
    """
    for _, layer in named_layers(model):
        if isinstance(layer, DistributedDataParallel):
            layer.require_backward_grad_sync = False
    yield


def is_silent(model: nn.Module, norms: Sequence[Norm]) -> bool:
    """Whether the forwards of a model exchange nothing: no synchronized norm is in it, and no sharded parameter.

    Then a rank that fails can say so. Otherwise the others are inside an exchange of the model's own by that time, in
    which they wait until its time-out, and a further one would be mistaken for it.
    """
    is_sharded = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    return not is_sharded and all(norm.spec.scope != "synced" for norm in norms)


def alone(make: Callable[[], T], caller: str) -> T:
    """What this rank makes, whatever the others do."""
    return make()


def as_many_on_all(batches: list[Any]) -> list[Any]:
    """As many batches as the rank with the fewest has: forwards that exchange something come in step."""
    return batches[: min(gathered(len(batches), EXAMINE))]


def share_statistics(statistics: dict[str, LayerStatistics], norms: Mapping[str, Norm]) -> None:
    """Give every layer that ran, on any rank, what it stores and what batches gave it on each rank."""
    if world_size() == 1:
        return
    own: dict[str, _Part] = {name: (known.stored, known.tracked, known.calls) for name, known in statistics.items()}
    every = gathered(own, EXAMINE)
    before = dict(statistics)
    statistics.clear()  # to have one order, too, on all ranks
    for name in dict.fromkeys(name for part in every for name in part):
        statistics[name] = known = before.get(name) or LayerStatistics.of(norms[name])
        nothing: _Part = (None, None, [])
        known.by_rank = [LayerStatistics(known.norm, *part.get(name, nothing)) for part in every]


def share_training(statistics: Mapping[str, LayerStatistics], found: dict[str, Moments]) -> None:
    """Merge what norms were given in training mode on all ranks, and keep it."""
    every = gathered(found, EXAMINE)
    for name, known in statistics.items():
        parts = [part[name] for part in every if name in part]
        if parts:
            known.training = reduce(Moments.merge, parts)


def mean_gap(own: Gap | None, readings: int) -> Gap | None:
    """The gap over the batches of all ranks; None if one of them could measure nothing."""
    every = gathered((own, readings), EXAMINE)
    gaps = [gap for gap, _ in every if gap is not None]
    if len(gaps) < len(every):
        return None
    total = sum(count for _, count in every)

    def mean(of: Callable[[Gap], float]) -> float:
        return math.fsum(of(gap) * (count / total) for gap, (_, count) in zip(gaps, every, strict=True))

    return replace(
        gaps[0],
        training=mean(lambda gap: gap.training),
        evaluation=mean(lambda gap: gap.evaluation),
        recalibrated=mean(lambda gap: gap.recalibrated),
        moved=mean(lambda gap: gap.moved),
    )


def mean_of(value: float) -> float:
    """The mean of a number over ranks, so that all decide the same by it."""
    every = gathered(value, EXAMINE)
    return sum(every) / len(every)


def largest_of(values: dict[str, float]) -> dict[str, float]:
    """Of numbers by name, the largest that a rank has."""
    every = gathered(values, EXAMINE)
    return {name: max(part.get(name, 0.0) for part in every) for name in values}


def merged_findings(own: Sequence[Finding], caller: str) -> list[Finding]:
    """The findings of all ranks, once each; those that not all of them have say which do."""
    every = gathered(list(own), caller)
    holders: dict[tuple[str, str | None], list[int]] = {}
    first: dict[tuple[str, str | None], Finding] = {}
    for rank, found in enumerate(every):
        for finding in found:
            first.setdefault((finding.code, finding.layer), finding)
            holders.setdefault((finding.code, finding.layer), []).append(rank)
    return [_on(finding, sorted(set(holders[place])), len(every)) for place, finding in first.items()]


def _on(finding: Finding, ranks: Sequence[int], count: int) -> Finding:
    if len(ranks) == count:
        return finding
    message = f"on {named_ranks(ranks)} of {count}: {finding.message}"
    return replace(finding, message=message, evidence={**finding.evidence, "on_ranks": list(ranks)})
