from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.doctor.rules.noisy_statistics import NOISY, batch_noise
from normkit.finding import Finding
from normkit.ranks import named_ranks


@rule("NK402", "unsynced-small-batch", severity="warning")
def unsynced_small_batch(evidence: Evidence) -> Iterator[Finding]:
    """The batches of single ranks are too small, and their statistics are not synchronized.

    Why it hurts: every rank normalizes with the statistics of its own few examples. The batch that the optimizer sees
    is as large as all of them together; the one that the norms see is not, and more ranks do not help.

    Evidence and threshold: the error of one rank's batch statistics, as in NK106, is 0.4 standard deviations or more,
    in a process group of several ranks and a layer that does not synchronize. It is given for every rank.

    Not a fault when: the layer is frozen, or corrects its statistics (batch renormalization).

    Remedy: `nk.convert(model, to="sync")`.
    """
    for name, known in evidence.statistics.items():
        ranks = len(known.by_rank)
        noises = [batch_noise(one) for one in known.by_rank]
        noise = max((one for one in noises if one is not None), default=0.0)
        if known.norm.spec.scope != "local" or known.norm.spec.kind != "batch" or noise < NOISY:
            continue
        on = [rank for rank, one in enumerate(noises) if one is not None and one >= NOISY]
        together = 1 / sum(1 / one**2 for one in noises if one) ** 0.5  # of independent means, weighted by their errors
        yield found(
            unsynced_small_batch,
            name,
            f"the mean of a batch of {'any rank' if len(on) == ranks else named_ranks(on)} is {noise:.2g} standard "
            f"deviations off the data's; over {ranks} ranks it would be {together:.2g}.",
            "nk.convert(model, to='sync', inplace=True), before DistributedDataParallel.",
            noise=noise,
            ranks=ranks,
            by_rank=noises,
        )
