"""The report as one HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from normkit.lab.findings import Cell, Figure, Table
from normkit.lab.report.drawing import Key, PointTable, Style, description, drawing, keys, point_table, styles
from normkit.lab.report.provenance import Facts, facts_of, states_text
from normkit.lab.report.section import Section
from normkit.lab.report.values import cell_text, column_texts, is_number
from normkit.optional import required

_PACKAGE = "normkit.lab.report"


class CellView(NamedTuple):
    """A cell as it is shown, and its number in full."""

    text: str
    number: str | None


class TableView(NamedTuple):
    """A table, with which of its columns are numbers'."""

    table: Table
    is_numeric: list[bool]
    rows: list[list[CellView]]


class FigureView(NamedTuple):
    """A figure with its legend, its numbers and its description."""

    id: str
    figure: Figure
    keys: list[Key]
    points: PointTable
    description: str


class SectionView(NamedTuple):
    """A section as the template takes it."""

    id: str
    section: Section
    facts: Facts
    tables: list[TableView]
    figures: list[FigureView]


def write_report(sections: Sequence[Section], path: Path) -> Path:
    """Write a page that shows all sections; return its path."""
    text = _render(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _render(sections: Sequence[Section]) -> str:
    jinja2 = required("jinja2", "A report")
    plotly = _script_text(required("plotly.offline", "A report").get_plotlyjs())
    script = _script_text(_resource("static", "report.js"))
    style = styles(sections)
    views = [_section_view(number, section, style) for number, section in enumerate(sections, 1)]
    page: str = _template(jinja2).render(
        sections=views,
        figures={view.id: drawing(view.figure, style) for section in views for view in section.figures},
        summary=_summary(sections),
        css=_resource("static", "report.css"),
        plotly=plotly,
        script=script,
        policy=_policy(plotly, script),
    )
    return page


def _template(jinja2: Any) -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _resource("templates", name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell_text
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("report.html")


def _resource(*names: str) -> str:
    return resources.files(_PACKAGE).joinpath(*names).read_text(encoding="utf-8")


def _script_text(text: str) -> str:
    """A script as it can stand inside a page: nothing ends it early, and browsers read just these bytes."""
    return re.sub(r"</(?=script)", r"<\\/", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE)


def _policy(*scripts: str) -> str:
    """Let these scripts run and no other, and let nothing be fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _summary(sections: Sequence[Section]) -> str:
    trials = [trial for section in sections for trial in section.run.trials]
    experiments = "1 experiment" if len(sections) == 1 else f"{len(sections)} experiments"
    return f"{experiments}, {len(trials)} trial{'' if len(trials) == 1 else 's'}: {states_text(trials) or 'none yet'}"


def _section_view(number: int, section: Section, style: dict[str, Style]) -> SectionView:
    name = f"section-{number}"
    return SectionView(
        id=name,
        section=section,
        facts=facts_of(section.run),
        tables=[_table_view(table) for table in section.findings.tables],
        figures=[
            FigureView(f"{name}-figure-{i}", figure, keys(figure, style), point_table(figure), description(figure))
            for i, figure in enumerate(section.findings.figures, 1)
        ],
    )


def _table_view(table: Table) -> TableView:
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    texts = zip(*(column_texts(column) for column in columns), strict=True)
    rows = [
        [_cell_view(cell, text) for cell, text in zip(row, shown, strict=True)]
        for row, shown in zip(table.rows, texts, strict=True)
    ]
    return TableView(table, [any(map(is_number, column)) for column in columns], rows)


def _cell_view(cell: Cell, text: str) -> CellView:
    return CellView(text, str(cell) if is_number(cell) else None)
