from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.doctor.rules.diverged_ranks import world_size
from normkit.doctor.rules.noisy_statistics import NOISY, batch_noise
from normkit.finding import Finding


@rule("NK402", "unsynced-small-batch", severity="warning")
def unsynced_small_batch(evidence: Evidence) -> Iterator[Finding]:
    """The batches of single ranks are too small, and their statistics are not synchronized.

    Why it hurts: every rank normalizes with the statistics of its own few examples. The batch that the optimizer sees
    is as large as all of them together; the one that the norms see is not, and more ranks do not help.

    Evidence and threshold: the error of one rank's batch statistics, as in NK106, is 0.4 standard deviations or more,
    in a process group of several ranks and a layer that does not synchronize.

    Not a fault when: the layer is frozen, or corrects its statistics (batch renormalization).

    Remedy: `nk.convert(model, to="sync")`.
    """
    ranks = world_size()
    if ranks == 1:
        return
    for name, known in evidence.statistics.items():
        noise = batch_noise(known)
        if known.norm.spec.scope != "local" or known.norm.spec.kind != "batch" or noise is None or noise < NOISY:
            continue
        yield found(
            unsynced_small_batch,
            name,
            f"the mean of a rank's batch is {noise:.2g} standard deviations off the data's; over {ranks} ranks it "
            f"would be {noise / ranks**0.5:.2g}.",
            "nk.convert(model, to='sync', inplace=True), before DistributedDataParallel.",
            noise=noise,
            ranks=ranks,
        )
