from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.norms import Norm, stored_moments


@rule("NK203", "inconsistent-freeze", severity="warning")
def inconsistent_freeze(evidence: Evidence) -> Iterator[Finding]:
    """Some norm layers train and some evaluate without need, or one is frozen at its random initialization.

    Why it hurts: a layer in evaluation mode keeps the statistics it has while the weights before it learn, so that they
    go stale during training, and only in some places. A layer that was frozen before weights were loaded into it
    normalizes with mean 0 and variance 1 for good.

    Evidence and threshold: of the norms with running statistics some are in training mode and some in evaluation, and
    one in evaluation has parameters, or weights before it, that learn; or one of several frozen layers is in training
    mode. Or a frozen layer has mean 0, variance 1, gamma 1 and beta 0.

    Not a fault when: all norms are in one mode, or those in evaluation are frozen with their weights, as a frozen
    backbone under a new head is.

    Remedy: `nk.freeze` or `nk.unfreeze` for whole parts of a model; load weights before freezing.
    """
    stored = [norm for norm, _ in evidence.stored]
    training = [norm for norm in stored if evidence.modes[norm.name]]
    evaluating = [norm for norm in stored if not evidence.modes[norm.name]]
    if training and evaluating:
        yield from _mixed(evidence, training, evaluating)
    for norm in evidence.norms:
        if norm.name in evidence.given and _is_frozen_at_start(evidence, norm, bool(training)):
            yield found(
                inconsistent_freeze,
                norm.name,
                "is frozen with mean 0 and variance 1, gamma 1 and beta 0: it was frozen before it was trained or "
                "loaded.",
                "Load the weights with their buffers first, then nk.freeze(model, inplace=True).",
            )


def _mixed(evidence: Evidence, training: list[Norm], evaluating: list[Norm]) -> Iterator[Finding]:
    """Layers in evaluation that learn, and frozen ones in training mode beside frozen ones in evaluation."""
    counts: dict[str, Any] = {"training": len(training), "evaluating": len(evaluating)}
    for norm in evaluating:
        if not evidence.is_frozen(norm):
            yield found(
                inconsistent_freeze,
                norm.name,
                f"is in evaluation mode while it or the layer before it learns, and {len(training)} other norms train.",
                "model.train(), or nk.freeze(model.part, inplace=True) for the part that is to be frozen.",
                **counts,
            )
    if any(evidence.is_frozen(norm) for norm in evaluating):
        for norm in training:
            if evidence.is_frozen(norm):
                yield found(
                    inconsistent_freeze,
                    norm.name,
                    "is in training mode although it is frozen, while other frozen norms are in evaluation.",
                    "nk.freeze(model.part, inplace=True), which survives train().",
                    **counts,
                )


def _is_frozen_at_start(evidence: Evidence, norm: Norm, some_train: bool) -> bool:
    stored = stored_moments(norm.layer)
    if stored is None or bool((stored.mean != 0).any()) or bool((stored.var != 1).any()):
        return False
    weight, bias = (getattr(norm.layer, name, None) for name in ("weight", "bias"))
    is_default = (weight is None or bool((weight == 1).all())) and (bias is None or bool((bias == 0).all()))
    if norm.name not in evidence.statistics:  # a class that never trains
        return is_default
    return is_default and some_train and not evidence.modes[norm.name] and evidence.is_frozen(norm)
