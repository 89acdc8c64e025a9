from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.cause import is_averaging
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.norms import Norm


@rule("NK101", "untrained-statistics", severity="error")
def untrained_statistics(evidence: Evidence) -> Iterator[Finding]:
    """Evaluation uses running statistics that no batch has updated.

    Why it hurts: mean 0 and variance 1 stand in for the data's own, so that the layer passes on what it is given,
    without normalizing it. Outputs are wrong, not noisy.

    Evidence and threshold: every running mean is exactly 0 and every running variance exactly 1, in a layer that ran on
    these batches. "cause" says why, where something shows it: "momentum" that is 0; "averaged-weights" in torch's
    AveragedModel; "buffers-left-out" where gamma or beta, its own or those of another norm, have moved from 1 and 0, so
    that the weights come from training and the statistics do not.

    Not a fault when: the layer is meant to do nothing in evaluation. A new model has this fault until its first step.

    Remedy: train for some steps in training mode, load a state_dict with its buffers, or `nk.recalibrate`. An average
    of weights (EMA, SWA) needs recalibrating whenever it is used.
    """
    for norm, known in evidence.stored:
        if not known.is_untrained:
            continue
        cause, why = _cause(evidence, norm)
        steps = "" if known.tracked is None else f" ({known.tracked} batches tracked)"
        yield found(
            untrained_statistics,
            norm.name,
            f"normalizes in evaluation with mean 0 and variance 1, which no batch has updated{steps}{why}.",
            "nk.recalibrate(model, batches, inplace=True), or load the buffers with the weights.",
            cause=cause,
            tracked=known.tracked,
            distance=known.distance,
            share=evidence.share_of(norm.name),
        )


def _cause(evidence: Evidence, norm: Norm) -> tuple[str | None, str]:
    """The cause, by a name for programs and in words; None where nothing shows it, as in a new model."""
    if norm.spec.momentum == 0:
        return "momentum", "; its momentum is 0, so that none ever will"
    if is_averaging(evidence):
        return "averaged-weights", (
            "; the model averages weights (EMA or SWA), which leaves the buffers those of the model it was made of"
        )
    is_own = _has_moved(norm)
    if not is_own and not any(_has_moved(other) for other in evidence.norms):
        return None, ""
    return "buffers-left-out", (
        f"; {'its gamma and beta' if is_own else 'the gamma and beta of other norms'} have been trained, so that the "
        "weights come from elsewhere: an EMA or SWA copy whose buffers were never updated, or a checkpoint without them"
    )


def _has_moved(norm: Norm) -> bool:
    """Whether gamma or beta are not those of a new layer."""
    own = norm.layer._parameters
    return _differs(own.get("weight"), 1.0) or _differs(own.get("bias"), 0.0)


def _differs(parameter: nn.Parameter | None, initial: float) -> bool:
    return parameter is not None and bool((parameter != initial).any())
