from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from normkit.doctor.evidence import Evidence, LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.ranks import named_ranks


@rule("NK403", "broadcast-hazard", severity="error")
def broadcast_hazard(evidence: Evidence) -> Iterator[Finding]:
    """Buffers are broadcast between the forwards of one backward.

    Why it hurts: DistributedDataParallel overwrites the buffers of every rank at the beginning of each forward. If two
    forwards come before one backward, autograd finds the buffers of the first changed ("modified by an inplace
    operation"), or the second forward runs with other statistics than the first.

    Evidence and threshold: the model is wrapped with `broadcast_buffers=True`, a norm with running statistics is in
    training mode, and one batch runs the whole model several times.

    Not a fault when: the forwards are followed by a backward each.

    Remedy: `broadcast_buffers=False`, with SyncBatchNorm, or one forward over the concatenated inputs.
    """
    model = evidence.model
    if not isinstance(model, nn.parallel.DistributedDataParallel) or not model.broadcast_buffers:
        return
    stored = [(norm, known) for norm, known in evidence.stored if evidence.modes[norm.name]]
    by_rank = _forwards([known for _, known in stored])
    forwards = max(by_rank)
    if forwards < 2:
        return
    on = [rank for rank, count in enumerate(by_rank) if count > 1]
    who = "" if len(on) == len(by_rank) else f" on {named_ranks(on)}"
    for norm, _ in stored:
        yield found(
            broadcast_hazard,
            norm.name,
            f"{forwards} forwards of one batch{who}, each of which first overwrites its running statistics with rank "
            "0's.",
            "DistributedDataParallel(model, broadcast_buffers=False), or one forward over torch.cat of the inputs.",
            forwards=forwards,
            by_rank=by_rank,
        )


def _forwards(stored: Sequence[LayerStatistics]) -> list[int]:
    """How often one batch runs the whole model, on each rank."""
    ranks = range(max((len(known.by_rank) for known in stored), default=0) or 1)
    calls = [[(known.by_rank or [known])[rank].calls for known in stored] for rank in ranks]
    return [min((1 + max(call.position for call in one) for one in of_rank if one), default=1) for of_rank in calls]
