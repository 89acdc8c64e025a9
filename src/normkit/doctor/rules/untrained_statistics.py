from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.norms import Norm


@rule("NK101", "untrained-statistics", severity="error")
def untrained_statistics(evidence: Evidence) -> Iterator[Finding]:
    """Evaluation uses running statistics that no batch has updated.

    Why it hurts: mean 0 and variance 1 stand in for the data's own, so that the layer passes on what it is given,
    without normalizing it. Outputs are wrong, not noisy.

    Evidence and threshold: every running mean is exactly 0 and every running variance exactly 1, in a layer that ran on
    these batches. If gamma or beta have moved from 1 and 0, the weights come from training and the statistics do not.

    Not a fault when: the layer is meant to do nothing in evaluation. A new model has this fault until its first step.

    Remedy: train for some steps in training mode, load a state_dict with its buffers, or `nk.recalibrate`. An average
    of weights (EMA, SWA) needs recalibrating whenever it is used.
    """
    for norm, known in evidence.stored:
        if not known.is_untrained:
            continue
        steps = "" if known.tracked is None else f" ({known.tracked} batches tracked)"
        yield found(
            untrained_statistics,
            norm.name,
            f"normalizes in evaluation with mean 0 and variance 1, which no batch has updated{steps}{_cause(norm)}.",
            "nk.recalibrate(model, batches, inplace=True), or load the buffers with the weights.",
            tracked=known.tracked,
            distance=known.distance,
            share=evidence.share_of(norm.name),
        )


def _cause(norm: Norm) -> str:
    weight, bias = norm.layer._parameters.get("weight"), norm.layer._parameters.get("bias")
    if norm.spec.momentum == 0:
        return "; its momentum is 0, so that none ever will"
    if not _differs(weight, 1.0) and not _differs(bias, 0.0):
        return ""
    return (
        "; its gamma and beta have been trained, so that its weights come from elsewhere: an EMA or SWA copy whose "
        "buffers were never updated, or a checkpoint without them"
    )


def _differs(parameter: nn.Parameter | None, initial: float) -> bool:
    return parameter is not None and bool((parameter != initial).any())
