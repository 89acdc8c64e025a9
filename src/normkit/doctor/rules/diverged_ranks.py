from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch

from normkit.doctor.evidence import Evidence, LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.moments import Moments
from normkit.ranks import named_ranks

APART = 0.02  # standard deviations


@rule("NK401", "diverged-ranks", severity="warning")
def diverged_ranks(evidence: Evidence) -> Iterator[Finding]:
    """The ranks of a process group hold different running statistics.

    Why it hurts: each process evaluates another model. The accuracy that rank 0 logs is not that of the checkpoint of
    rank 1, and ranks that vote or average disagree.

    Evidence and threshold: the stored means or standard deviations of one layer differ between ranks by 0.02 standard
    deviations or more, as a root mean square over channels. Ranks that hold the same are one group of the evidence;
    for each rank there is its distance from the others, whose statistics are merged with the numbers of batches that
    they were taken over. Examine must be called on every rank.

    Not a fault when: between two steps under DistributedDataParallel, which sends out the buffers of rank 0 at the next
    forward.

    Remedy: SyncBatchNorm, `broadcast_buffers=True`, or average the statistics before evaluation.
    """
    for norm, known in evidence.stored:
        stored = [one.stored for one in known.by_rank if one.stored is not None]
        if len(stored) < max(2, len(known.by_rank)):  # a layer that did not run everywhere is not compared
            continue
        apart = _apart(stored)
        if apart < APART:
            continue
        groups = _groups(stored)
        from_others = [_from_others(known.by_rank, rank) for rank in range(len(stored))]
        yield found(
            diverged_ranks,
            norm.name,
            f"stores other statistics on other ranks: {_in_words(groups, from_others, apart)}.",
            "nk.convert(model, to='sync'), or broadcast the buffers of one rank before evaluation.",
            apart=apart,
            ranks=len(stored),
            groups=groups,
            from_others=from_others,
            batches=[one.tracked for one in known.by_rank],
        )


def _apart(stored: Sequence[Moments]) -> float:
    """The distance of those that are the farthest apart; NaN if there are values that cannot be compared."""
    means, variances = torch.stack([one.mean for one in stored]), torch.stack([one.var for one in stored])
    if torch.equal(means, means[:1].expand_as(means)) and torch.equal(variances, variances[:1].expand_as(variances)):
        return 0.0
    std = variances.mean(0).clamp(min=1e-30).sqrt()
    of_means = ((means.amax(0) - means.amin(0)) / std).square().mean().sqrt().item()
    deviations = variances.clamp(min=0).sqrt()
    return max(of_means, ((deviations.amax(0) - deviations.amin(0)) / std).square().mean().sqrt().item())


def _groups(stored: Sequence[Moments]) -> list[list[int]]:
    """The ranks that hold the same, by the first of them; the largest group first."""
    groups: list[list[int]] = []
    for rank, one in enumerate(stored):
        home = next((group for group in groups if _apart([stored[group[0]], one]) < APART), None)
        groups.append([rank]) if home is None else home.append(rank)
    return sorted(groups, key=len, reverse=True)


def _from_others(by_rank: Sequence[LayerStatistics], rank: int) -> float:
    """How far one rank is from all others together, each with the weight of its batches."""
    others = [one for index, one in enumerate(by_rank) if index != rank]
    are_counted = all(one.tracked for one in others)
    parts = [one.stored._replace(count=(one.tracked or 1) if are_counted else 1) for one in others if one.stored]
    own = by_rank[rank].stored
    assert own is not None
    return _apart([own, reduce(Moments.merge, parts)])


def _in_words(groups: Sequence[Sequence[int]], from_others: Sequence[float], apart: float) -> str:
    most, *rest = groups
    if len(most) == 1 or not rest:
        return f"{named_ranks(range(len(from_others)))} are {apart:.2g} standard deviations apart"
    said = [
        f"{named_ranks(group)} {'is' if len(group) == 1 else 'are'} {max(from_others[rank] for rank in group):.2g} "
        "standard deviations"
        for group in rest
    ]
    return f"{'; '.join(said)} from the others ({named_ranks(most)})"
