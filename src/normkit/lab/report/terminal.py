"""The findings of a run on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from normkit.lab.findings import Findings, Outcome, Table
from normkit.lab.report.values import column_texts, is_number

_STYLES: dict[Outcome, str] = {"supported": "bold green", "contradicted": "bold red", "unclear": "bold yellow"}


def terminal_table(findings: Findings) -> RenderableType:
    """Return the verdict, its reasons and the tables, for rich to print."""
    return Group(*_parts(findings))


def _parts(findings: Findings) -> Iterator[RenderableType]:
    yield Text.assemble((findings.outcome, _STYLES[findings.outcome]), ": ", findings.claim)
    yield Text(findings.source, style="dim")
    yield from (_item(reason) for reason in findings.reasons)
    for table in findings.tables:
        yield Text()
        yield _table(table)
        if table.note:
            yield Text(table.note, style="dim")
    if findings.notes:
        yield Text("\nBefore believing it:")
        yield from (_item(note) for note in findings.notes)


def _item(text: str) -> RenderableType:
    """A line of a list, wrapped under itself."""
    grid = RichTable.grid()
    grid.add_row(Text("- "), Text(text))
    return Padding(grid, (0, 0, 0, 2))


def _table(table: Table) -> RichTable:
    """Texts, not markup: a name may have brackets."""
    drawn = RichTable(title=Text(table.title), title_justify="left")
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    for number, (heading, cells) in enumerate(zip(table.columns, columns, strict=True)):
        side: Literal["left", "right"] = "right" if any(map(is_number, cells)) else "left"
        drawn.add_column(
            Text(heading), justify=side, no_wrap=number == 0, overflow="fold"
        )  # names are whole, whatever is narrow
    for row in zip(*map(column_texts, columns), strict=True):
        drawn.add_row(*map(Text, row))
    return drawn
