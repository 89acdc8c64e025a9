from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

NOISY = 0.375  # standard deviations


@rule("NK106", "noisy-statistics", severity="warning")
def noisy_statistics(evidence: Evidence) -> Iterator[Finding]:
    """There are too few values per channel: the statistics of a batch are far from those of the data.

    Why it hurts: in training every output depends on which other examples are in its batch, by as much as that error;
    the running statistics average it away, so that evaluation computes something else.

    Evidence and threshold: the standard error of a batch's mean, in standard deviations of the data, as a root mean
    square over channels. It is measured from how far the means of single examples scatter, because the positions of one
    picture tell less than as many independent values: above 0.4 it is found, below 0.35 never. Independent values reach
    0.35 at 8 per channel.

    Not a fault when: training uses larger batches than these, or gets the layer's statistics in another way: batch
    renormalization, synchronized ranks and layers that are frozen are not reported.

    Remedy: larger batches; statistics within an example (group, layer); batch renormalization; synchronized or
    accumulated batches.
    """
    some_train = any(evidence.modes.values())
    for name, known in evidence.statistics.items():
        if known.norm.spec.kind not in ("batch", "accumulated") or (some_train and not evidence.modes[name]):
            continue
        noise = batch_noise(known)
        if noise is None or noise < NOISY:
            continue
        values = min(call.values for one in known.by_rank or [known] for call in one.calls)
        yield found(
            noisy_statistics,
            name,
            f"the mean of a batch is {noise:.2g} standard deviations off the data's: a channel has {values} values "
            "in a batch.",
            "Use larger batches, or nk.convert(model, to='group') or to='renorm'.",
            noise=noise,
            values=values,
        )


def batch_noise(known: LayerStatistics) -> float | None:
    """The error of the statistics that a layer takes: of a part of the batch, or of several batches together."""
    if known.noise is None:
        return None
    examples = max((call.examples for one in known.by_rank or [known] for call in one.calls), default=1)
    chunk = getattr(known.norm.layer, "chunk_size", None) if known.norm.spec.scope == "ghost" else None
    parts = examples / min(chunk, examples) if isinstance(chunk, int) else 1.0
    together = getattr(known.norm.layer, "micro_batches", 1) if known.norm.spec.kind == "accumulated" else 1
    return float(known.noise * (parts / together) ** 0.5)
