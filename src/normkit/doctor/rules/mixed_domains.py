from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

APART = 0.5  # standard deviations between the means of two groups of batches
_SURE = 4.0  # times the distance that chance explains, of which a split at the widest gap makes the most
_TIGHT = 0.3  # of that distance: how far the batches of one group may be from their mean


class Groups(NamedTuple):
    """Batches in two groups, and the distance of their means in standard deviations, beyond what noise explains."""

    first: list[int]
    second: list[int]
    apart: float


@rule("NK108", "mixed-domains", severity="warning")
def mixed_domains(evidence: Evidence) -> Iterator[Finding]:
    """One set of statistics serves several distributions of batches: real and fake, source and target.

    Why it hurts: in training each batch is normalized by itself, in evaluation by the average of all, which is the
    statistics of neither distribution. The gap is worst where the two differ most.

    Evidence and threshold: the batches fall into two groups whose means are 0.5 standard deviations apart or more (root
    mean square over channels), four times what the scatter of single examples explains, and the batches of each group
    are near each other beside that.

    Not a fault when: evaluation is of mixed batches, as training should then be.

    Remedy: both distributions in every batch, or statistics for each: `nk.DomainBatchNorm2d`,
    `nk.convert(model, to="domain")`.
    """
    for norm, known in evidence.stored:
        groups = two_groups(known)
        if groups is None:
            continue
        yield found(
            mixed_domains,
            norm.name,
            f"batches are of two distributions, whose means are {groups.apart:.2g} standard deviations apart: "
            f"{groups.first} and {groups.second} (the first batch is 0).",
            "Put both into every batch, or use nk.convert(model, to='domain') and nk.domain(model, k).",
            apart=groups.apart,
            first=groups.first,
            second=groups.second,
        )


def two_groups(known: LayerStatistics) -> Groups | None:
    """The two groups that the batches of a layer fall into; None if they do not."""
    calls = [call for call in known.finite_calls if call.position == 0]
    if len(calls) < 2 or known.data is None or known.noise is None:
        return None
    alive = known.data.var > 0
    means = torch.stack([call.moments.mean for call in calls])[:, alive]
    means = (means - known.data.mean[alive]) / known.data.var[alive].sqrt()
    if not means.numel():
        return None
    first, second = _split(means)
    gap = means[first].mean(0) - means[second].mean(0)
    chance = known.noise**2 * (1 / len(first) + 1 / len(second))
    square = gap.square().mean().item()
    width = max((means[group] - means[group].mean(0)).square().mean().sqrt().item() for group in (first, second))
    apart = max(square - chance, 0.0) ** 0.5
    if apart < APART or square < _SURE**2 * chance or width > _TIGHT * apart:
        return None
    numbers = [call.batch for call in calls]
    return Groups([numbers[i] for i in first], [numbers[i] for i in second], apart)


def _split(means: Tensor) -> tuple[list[int], list[int]]:
    """Split rows at the widest gap along the direction in which they differ most."""
    _, _, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
    places, order = (means @ directions[0]).sort()
    cut = int(places.diff().argmax()) + 1
    groups = sorted([sorted(order[:cut].tolist()), sorted(order[cut:].tolist())])
    return groups[0], groups[1]
