"""What an examination found, sorted by what it costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from normkit.batches import Forward
from normkit.doctor.evidence.measure import LossFunction
from normkit.finding import Finding

if TYPE_CHECKING:
    from normkit.doctor.cure import Cure

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

    def cure(self, *, inplace: bool = False) -> Cure:
        """Apply the remedies that are safe, one after another, and measure before and after each.

        Statistics are taken from the batches again (NK101 to NK104), an inverted momentum is turned round (NK104), and
        freezes and modes are made consistent (NK202, NK203). A remedy that makes the measure worse is taken back. What
        is not safe to do for you is skipped, and the reason says what to do.

        Args:
            inplace: on the model itself instead of a copy.
        """
        from normkit.doctor.cure import cure

        return cure(self, inplace)

    def to_json(self) -> str:
        """All findings and all that was measured."""
        from normkit.doctor.report.document import as_document

        return json.dumps(as_document(self), indent=2)

    def to_sarif(self, file: str | os.PathLike[str] | None = None) -> str:
        """The findings as SARIF 2.1.0, which GitHub, GitLab and editors show.

        Args:
            file: where findings stand that no line is known for, if the model's class is not defined in this folder.
        """
        from normkit.doctor.report.sarif import Place, place_of, sarif_text

        place = place_of(self.patient.model) or (None if file is None else Place(os.fspath(file)))
        return sarif_text(self.findings, place)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that works offline: findings, a map of the norm layers, and their statistics."""
        from normkit.doctor.report.page import write_diagnosis

        return write_diagnosis(self, Path(path))

    def __str__(self) -> str:
        from normkit.doctor.report.text import plain_text

        return plain_text(self)


def by_cost(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, and within it by their share of the gap; those that are equal stay in their order."""
    return sorted(findings, key=lambda one: (_ORDER[one.severity], -float(one.evidence.get("share") or 0.0)))
