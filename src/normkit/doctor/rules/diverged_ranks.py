from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from normkit.batches import device_of
from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

APART = 0.02  # standard deviations


def world_size() -> int:
    """How many processes there are in the group; 1 without a group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@rule("NK401", "diverged-ranks", severity="warning")
def diverged_ranks(evidence: Evidence) -> Iterator[Finding]:
    """The ranks of a process group hold different running statistics.

    Why it hurts: each process evaluates another model. The accuracy that rank 0 logs is not that of the checkpoint of
    rank 1, and ranks that vote or average disagree.

    Evidence and threshold: the stored means or standard deviations of one layer differ between ranks by 0.02 standard
    deviations or more, as a root mean square over channels. Examine must be called on every rank.

    Not a fault when: between two steps under DistributedDataParallel, which sends out the buffers of rank 0 at the next
    forward.

    Remedy: SyncBatchNorm, `broadcast_buffers=True`, or average the statistics before evaluation.
    """
    if world_size() == 1:
        return
    stored = [(norm, known.stored) for norm, known in evidence.stored if known.stored is not None]
    device = device_of(evidence.model)
    packed = torch.cat([torch.zeros(1, dtype=torch.double), *(torch.cat([s.mean, s.var]) for _, s in stored)]).to(
        device
    )
    every = [torch.empty_like(packed) for _ in range(world_size())]
    distributed.all_gather(every, packed)
    ranks = torch.stack(every).cpu()[:, 1:]
    sizes = [2 * own.mean.numel() for _, own in stored]
    for (norm, _), values in zip(stored, ranks.split(sizes, 1), strict=True):
        apart = _apart(*values.chunk(2, 1))
        if not apart < APART:
            yield found(
                diverged_ranks,
                norm.name,
                f"stores other statistics on other ranks: they are {apart:.2g} standard deviations apart.",
                "nk.convert(model, to='sync'), or broadcast the buffers of one rank before evaluation.",
                apart=apart,
                ranks=len(ranks),
            )


def _apart(means: Tensor, variances: Tensor) -> float:
    std = variances.mean(0).clamp(min=1e-30).sqrt()
    of_means = ((means.amax(0) - means.amin(0)) / std).square().mean().sqrt().item()
    deviations = variances.clamp(min=0).sqrt()
    return max(of_means, ((deviations.amax(0) - deviations.amin(0)) / std).square().mean().sqrt().item())
