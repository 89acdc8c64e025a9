from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding, Severity
from normkit.named_layers import display_name

SEEN = 0.02  # the relative change of the standard deviation that is reported
COSTLY = 0.25  # ... and that is a warning, if the layer also has this part of a material gap


@rule("NK303", "dropout-before-norm", severity="info")
def dropout_before_norm(evidence: Evidence) -> Iterator[Finding]:
    """Dropout before a norm shifts the variance that evaluation will see.

    Why it hurts: dropout raises the variance of what it returns in training, by the factor 1 / (1 - p) and more, and
    does nothing in evaluation. The running variance is that of training, so that in evaluation the layer divides by
    too much (Li et al. 2019).

    Evidence and threshold: the operators of a forward in training mode show random zeros that reach the norm, whether a
    module or `F.dropout` makes them, and the standard deviation of the norm's input is another in training than in
    evaluation, by 2% or more. It is a warning if that is 25% or more and the layer has as much of a material gap.

    Not a fault when: the rate is small, or the gap is nothing beside what dropout gains.

    Remedy: dropout after the last norm, or recalibrate after training: `nk.recalibrate` runs without dropout.
    """
    for name, origins in evidence.dropout.items():
        known = evidence.statistics.get(name)
        norm = evidence.by_name.get(name)
        if norm is not None and (known is None or known.stored is None):
            continue  # a norm within an example, or one that stores nothing: evaluation takes its own variance
        shift = None if known is None else _shift(known)
        if shift is not None and abs(shift) < SEEN:
            continue
        where = " and ".join(sorted(map(display_name, origins)))
        how = "" if shift is None else f": its standard deviation is {1 + shift:.2f} times that of evaluation"
        yield found(
            dropout_before_norm,
            name,
            f"gets its input through dropout in {where}, which changes the variance in training alone{how}.",
            "Move the dropout behind the last norm, or nk.recalibrate(model, batches, inplace=True) after training.",
            severity=_severity(evidence, name, shift),
            shift=shift,
            dropout=sorted(origins),
            share=evidence.share_of(name),
        )


def _shift(known: LayerStatistics) -> float | None:
    """By how much the standard deviation is larger in training, as the median over channels."""
    if known.training is None or known.data is None:
        return None
    alive = known.data.var > 0
    if not alive.any():
        return None
    return float((known.training.var[alive] / known.data.var[alive]).sqrt().median()) - 1


def _severity(evidence: Evidence, name: str, shift: float | None) -> Severity:
    is_costly = abs(shift or 0.0) >= COSTLY and (evidence.share_of(name) or 0.0) >= COSTLY
    return "warning" if is_costly else "info"
