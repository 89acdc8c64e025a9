"""One experiment in a report."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.lab.findings import Findings
from normkit.lab.record import Run


@dataclass(frozen=True)
class Section:
    """A run, what it found, and how to run it again."""

    run: Run
    findings: Findings
    title: str
    command: str
