"""One experiment in a report."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.lab.certainty import Certainty
from normkit.lab.findings import Findings
from normkit.lab.record import Run


@dataclass(frozen=True)
class Section:
    """A run, what it found, how to run it again, and how sure its verdict is."""

    run: Run
    findings: Findings
    title: str
    command: str
    certainty: Certainty | None = None  # None: not known

    @property
    def how_sure(self) -> str:
        """How sure the verdict is, in words; empty if that is not known."""
        return "" if self.certainty is None else self.certainty.text(self.findings.outcome)
