from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from normkit.batches import in_evaluation
from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding, Severity
from normkit.surgery.fold import fold
from normkit.surgery.parity import tolerance
from normkit.surgery.result import Surgery

_MOVES = re.compile(r"would move by (\S+) \((\S+) relative\)")  # how fold says that a fold has proved unsound


@rule("NK503", "lossy-fold", severity="warning", seen_by=("examine", "fold"))
def lossy_fold(evidence: Evidence) -> Iterator[Finding]:
    """Folding a norm into the layer beside it moves the output by more than the type allows.

    Why it hurts: folded, gamma / sqrt(variance + eps) becomes a part of the weights and is rounded with them. In half
    precision, or with a scale that differs by many powers of ten between channels, that costs accuracy, and every tool
    that folds before it deploys or quantizes does it without a word.

    Evidence and threshold: `nk.fold` on a copy, on one of these batches: a layer whose output would move by more than
    rounding explains (then fold leaves the norm as it is), or outputs that differ by more than 1e-4 of the largest in
    float32, 1e-10 in float64, 1e-2 in float16 and 5e-2 in bfloat16. `nk.fold(...).parity` has `.ok`, `.error` and
    `.tolerance`. It is a warning from ten times that on.

    Not a fault when: the model is not going to be folded.

    Remedy: fold in float32 and convert afterwards; look for channels with a variance near zero (NK105).
    """
    example = evidence.runs.several
    if example is None or not evidence.exchangeable or _is_broken(evidence):
        return
    try:
        result = _folded(evidence, example)
    except Exception:  # a model that cannot be copied or folded loses nothing by it
        return
    limit = tolerance(evidence.model)
    refused = {skip.layer: match for skip in result.skipped if (match := _MOVES.search(skip.why)) is not None}
    for layer, match in refused.items():
        yield found(
            lossy_fold,
            layer,
            f"folded, its output would move by {match[2]} of its largest value, more than its rounding explains.",
            "Fold in float32, then convert: nk.fold(model.float().eval(), example).",
            severity=_severity(float(match[2]), limit),
            error=float(match[2]),
            tolerance=limit,
        )
    parity = result.parity
    if parity is not None and not parity.ok:
        yield found(
            lossy_fold,
            parity.first_layer if parity.first_layer is not None else "",
            f"folding moves the outputs by {parity.error:.2g} of the largest; {parity.tolerance:.2g} is allowed.",
            "Fold in float32, then convert: nk.fold(model.float().eval(), example).",
            severity=_severity(parity.error, parity.tolerance),
            error=parity.error,
            tolerance=parity.tolerance,
        )


def _severity(error: float, limit: float) -> Severity:
    """A little more than the tolerance is what deep networks make of rounding, and not yet a cost."""
    return "warning" if error > 10 * limit else "info"


def _folded(evidence: Evidence, example: Any) -> Surgery:
    with in_evaluation(evidence.model):
        twin = copy.deepcopy(evidence.model)
    return fold(twin, example, forward=evidence.runs.forward, inplace=True)


def _is_broken(evidence: Evidence) -> bool:
    """Whether statistics are not finite: then nothing that is folded can be compared."""
    stored = [known.stored for _, known in evidence.stored if known.stored is not None]
    return any(not (own.mean.isfinite().all() and own.var.isfinite().all() and (own.var >= 0).all()) for own in stored)
