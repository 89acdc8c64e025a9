from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.cause import cause_of
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding, Severity

FAR = 0.45  # standard deviations, or the same part of a material gap
WIDE = 1.0  # the gap over the measure without it, from which on it is reported although no layer is far off
FEW = 0.05  # the part of the initial values below which a moving average is about to arrive
_NEAR = 0.1  # standard deviations below which a layer is not blamed for any gap


@rule("NK102", "stale-statistics", severity="warning")
def stale_statistics(evidence: Evidence) -> Iterator[Finding]:
    """Stored statistics are not the data's: evaluation computes something else than training did.

    Why it hurts: the model was trained with every channel centered and scaled by its batch. In evaluation the stored
    mean and variance do that, and if they are others, every layer after them is given what it never saw.

    Evidence and threshold: the stored mean or standard deviation of a layer is off the data's own by 0.5 of the data's
    standard deviations or more (root mean square over channels; below 0.35 never), or the layer has half of a material
    gap. The gap is that of the loss or, without one, of the outputs, between evaluation with stored and with
    re-estimated statistics; each layer's part is what exchanging its statistics recovers, in the order of the layers
    and in the reverse order. It is an error if the gap is material, and info if it is not and the last 5% of the
    initial values, in channels of small variance, are all that is wrong. A wide gap that many layers share, none of
    which is far off, is reported at the layer with the largest part.

    The likely cause is named: too few steps since initialization, pruned weights, averaged ones (EMA, SWA), an input
    that is shifted or scaled, or statistics of something else.

    Not a fault when: the batches are meant to be of another distribution than the model's. Then they need a model, or
    statistics, of their own: `nk.adapt`.

    Remedy: `nk.recalibrate` on data of the kind that the model will see.
    """
    stale = [known for _, known in evidence.stored if not known.is_untrained and known.distance is not None]
    blamed = [known for known in stale if (known.distance or 0) >= FAR or _has_most(evidence, known)]
    is_shared = not blamed
    for known in blamed or _first_of_many(evidence, stale):
        name, share = known.norm.name, evidence.share_of(known.norm.name)
        cause = cause_of(evidence, known, is_shared)
        yield found(
            stale_statistics,
            name,
            f"stores statistics that are {known.distance:.2g} standard deviations off those of these batches"
            f"{_part(evidence, share)}. Likely cause: {cause.words}.",
            "nk.recalibrate(model, batches, inplace=True)",
            severity=_severity(evidence, known),
            distance=known.distance,
            share=share,
            cause=cause.name,
            tracked=known.tracked,
        )


def _severity(evidence: Evidence, known: LayerStatistics) -> Severity:
    """An error if it costs something; only info if what is left of the initial values is all that is wrong."""
    if evidence.gap is not None and evidence.gap.is_material:
        return "error"
    return "info" if known.is_still_arriving and known.initial_part < FEW else "warning"


def _has_most(evidence: Evidence, known: LayerStatistics) -> bool:
    return (known.distance or 0) > _NEAR and (evidence.share_of(known.norm.name) or 0) >= FAR


def _first_of_many(evidence: Evidence, stale: list[LayerStatistics]) -> list[LayerStatistics]:
    """Of a wide gap in which many layers have a small part, the layer with the largest; nothing if there is none."""
    gap = evidence.gap
    if gap is None or not gap.is_material or not evidence.shares or gap.size < WIDE * gap.scale:
        return []
    return [max(stale, key=lambda known: evidence.share_of(known.norm.name) or 0.0)] if stale else []


def _part(evidence: Evidence, share: float | None) -> str:
    gap = evidence.gap
    if gap is None or share is None:
        return ""
    if gap.measure == "loss":
        return (
            f"; {share:.0%} of the gap comes from it (loss {gap.evaluation:.3g} in evaluation, {gap.training:.3g} in "
            f"training, {gap.recalibrated:.3g} recalibrated)"
        )
    return f"; {share:.0%} of the gap comes from it (outputs are {gap.evaluation:.2g} standard deviations off)"
