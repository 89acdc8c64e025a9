"""What `normkit lab` prints of several experiments, or of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.table import Table as RichTable

from normkit.figures import Table
from normkit.figures.terminal import rich_table

if TYPE_CHECKING:
    from normkit.lab import Comparison
    from normkit.lab.comparison import ComparedExperiment
    from normkit.lab.report import Section


def verdict_table(sections: Sequence[Section]) -> RichTable:
    """The verdicts of a run, each with how sure it is."""
    rows = [[section.title, section.findings.outcome, section.how_sure] for section in sections]
    return rich_table(Table("Verdicts", ["experiment", "verdict", "how sure"], rows))


def comparison_tables(comparison: Comparison) -> Iterator[RichTable]:
    """What two runs differ in, and what they found, experiment by experiment."""
    columns = ["", *map(str, comparison.directories)]
    if comparison.conditions:
        rows = [[name, *pair] for name, pair in comparison.conditions.items()]
        yield rich_table(Table("What the runs differ in", columns, rows))
    for experiment in comparison.experiments:
        title = f"{experiment.name}: {'the same verdict' if experiment.agrees else 'the verdicts differ'}"
        yield rich_table(Table(title, columns, list(_rows(experiment))))


def _rows(experiment: ComparedExperiment) -> Iterator[list[str]]:
    one, other = experiment.sections
    yield ["verdict", one.findings.outcome, other.findings.outcome]
    yield ["how sure", one.how_sure, other.how_sure]
    yield from ([name, *pair] for name, pair in experiment.settings.items())
    reasons = zip_longest(one.findings.reasons, other.findings.reasons, fillvalue="")
    yield from (["" if number else "reasons", *pair] for number, pair in enumerate(reasons))


def comparison_text(comparison: Comparison) -> str:
    """What it comes down to, in a line or two."""
    differ = [experiment.name for experiment in comparison.experiments if not experiment.agrees]
    names = ", ".join(differ) or "none"
    lines = [f"Verdicts that differ, of {len(comparison.experiments)}: {names}."]
    for directory, only in zip(comparison.directories, comparison.only, strict=True):
        lines += [f"Only in {directory}: {', '.join(only)}."] if only else []
    return "\n".join(lines)
