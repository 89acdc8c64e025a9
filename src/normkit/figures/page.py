"""Figures and tables as one HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from normkit.atomic import replacing
from normkit.figures.drawing import Key, PointTable, Style, description, drawing, keys, point_table, styles
from normkit.figures.figure import Cell, Figure, Table
from normkit.figures.values import cell_text, column_texts, is_number
from normkit.optional import required

_PACKAGE = "normkit.figures"


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
    """A figure with its legend, its numbers, its description and what the script draws."""

    id: str
    figure: Figure
    keys: list[Key]
    points: PointTable
    description: str
    drawing: dict[str, Any]


def write_page(title: str, lead: str, figures: Sequence[Figure], tables: Sequence[Table], path: Path) -> Path:
    """Write a page that shows figures and then tables, under a title and a sentence that leads to them."""
    views = figure_views(figures, "figure")
    text = rendered("figures.html", views, title=title, lead=lead, views=views, tables=[table_view(t) for t in tables])
    return write_text(path, text)


def rendered(template: str, drawn: Sequence[FigureView], package: str = _PACKAGE, **values: object) -> str:
    """A page of a template of this package or another, with the stylesheet, the scripts and what they draw."""
    jinja2 = required("jinja2", "A report")
    scripts = _scripts() if drawn else []
    page: str = _template(jinja2, template, package).render(
        figures={view.id: view.drawing for view in drawn},
        css=_resource(_PACKAGE, "static", "report.css"),
        scripts=scripts,
        policy=_policy(scripts),
        **values,
    )
    return page


def write_text(path: Path, text: str) -> Path:
    """Write a page, in a new folder if need be; it appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def figure_views(figures: Sequence[Figure], name: str) -> list[FigureView]:
    """Figures as templates take them: in one style, with ids that begin with a name."""
    style = styles(figures)
    return [_figure_view(f"{name}-{i}", figure, style) for i, figure in enumerate(figures, 1)]


def _figure_view(id: str, figure: Figure, style: dict[str, Style]) -> FigureView:
    shown = keys(figure, style), point_table(figure), description(figure), drawing(figure, style)
    return FigureView(id, figure, *shown)


def table_view(table: Table) -> TableView:
    """A table as templates take it."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    texts = zip(*(column_texts(column) for column in columns), strict=True)
    rows = [
        [_cell_view(cell, text) for cell, text in zip(row, shown, strict=True)]
        for row, shown in zip(table.rows, texts, strict=True)
    ]
    return TableView(table, [any(map(is_number, column)) for column in columns], rows)


def _cell_view(cell: Cell, text: str) -> CellView:
    return CellView(text, str(cell) if is_number(cell) else None)


def _template(jinja2: Any, name: str, package: str) -> Any:
    """A template of a package, which may use the parts in this one."""
    loaders = [jinja2.PackageLoader(each, "templates") for each in dict.fromkeys((package, _PACKAGE))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell_text
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template(name)


def _resource(package: str, *names: str) -> str:
    return resources.files(package).joinpath(*names).read_text(encoding="utf-8")


def _scripts() -> list[str]:
    """What draws figures: plotly, and the script that calls it."""
    plotly = required("plotly.offline", "A report").get_plotlyjs()
    return [_script_text(text) for text in (plotly, _resource(_PACKAGE, "static", "report.js"))]


def _script_text(text: str) -> str:
    """A script as it can stand inside a page: nothing ends it early, and browsers read just these bytes."""
    return re.sub(r"</(?=script)", r"<\\/", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE)


def _policy(scripts: Sequence[str]) -> str:
    """Let these scripts run and no other, and let nothing be fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
