"""What an experiment finds, as data: a verdict with its reasons, tables, curves. Reports draw it and add nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from normkit.figures.figure import Figure, Pictures, Table

Outcome = Literal["supported", "contradicted", "unclear"]


@dataclass(frozen=True)
class Findings:
    """What a run says about its claim."""

    claim: str
    source: str  # of the claim
    outcome: Outcome
    reasons: Sequence[str]  # each a sentence with the numbers it rests on
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()  # what a reader should know before believing it
    pictures: Sequence[Pictures] = ()
