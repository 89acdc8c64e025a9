"""The report as one HTML file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from normkit.figures.page import FigureView, TableView, figure_views, rendered, table_view, write_text
from normkit.lab.report.provenance import Facts, facts_of, states_text
from normkit.lab.report.section import Section


class SectionView(NamedTuple):
    """A section as templates take it."""

    id: str
    section: Section
    facts: Facts
    tables: list[TableView]
    figures: list[FigureView]


def write_report(sections: Sequence[Section], path: Path) -> Path:
    """Write a page that shows all sections; return its path."""
    views = [section_view(section, f"section-{number}") for number, section in enumerate(sections, 1)]
    figures = [figure for view in views for figure in view.figures]
    text = rendered("report.html", figures, package="normkit.lab.report", sections=views, summary=_summary(sections))
    return write_text(path, text)


def _summary(sections: Sequence[Section]) -> str:
    trials = [trial for section in sections for trial in section.run.trials]
    experiments = "1 experiment" if len(sections) == 1 else f"{len(sections)} experiments"
    return f"{experiments}, {len(trials)} trial{'' if len(trials) == 1 else 's'}: {states_text(trials) or 'none yet'}"


def section_view(section: Section, id: str) -> SectionView:
    """A section as templates take it, with ids that begin with its own."""
    return SectionView(
        id=id,
        section=section,
        facts=facts_of(section.run),
        tables=[table_view(table) for table in section.findings.tables],
        figures=figure_views(section.findings.figures, f"{id}-figure"),
    )
