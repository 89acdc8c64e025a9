"""What an examination found, sorted by what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.doctor.evidence.measure import LossFunction
from normkit.finding import Finding

_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Patient:
    """What was examined, kept so that remedies can be applied and measured."""

    model: nn.Module
    batches: Sequence[Any]
    loss: LossFunction | None = None
    forward: Forward | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`.

    Attributes:
        findings: errors first, then warnings, then what is only worth knowing; in each, the layer with the largest
            share of the train/eval gap first.
        evidence: what was measured, as plain data: "gap" has the measure in training, evaluation and recalibrated mode;
            "layers" the stored and the data's own statistics of every norm, and its share of the gap.
        patient: what was examined.
    """

    findings: Sequence[Finding]
    evidence: Mapping[str, Any]
    patient: Patient = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "info" for finding in self.findings)


def by_cost(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, and within it by their share of the gap; those that are equal stay in their order."""
    return sorted(findings, key=lambda one: (_ORDER[one.severity], -float(one.evidence.get("share") or 0.0)))
