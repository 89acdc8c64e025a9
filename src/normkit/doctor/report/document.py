"""A diagnosis in JSON's types, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normkit.environment import version_of
from normkit.jsonable import jsonable

if TYPE_CHECKING:
    from normkit.doctor.diagnosis import Diagnosis


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that was found and measured."""
    return {
        "normkit": version_of("normkit"),
        "model": type(diagnosis.patient.model).__name__,
        "ok": diagnosis.ok,
        "findings": [jsonable(vars(finding)) for finding in diagnosis.findings],
        "evidence": jsonable(diagnosis.evidence),
    }
