"""Tables and lists on a terminal."""

from __future__ import annotations

from typing import Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from normkit.figures.figure import Table
from normkit.figures.values import column_texts, is_number


def rich_table(table: Table) -> RichTable:
    """A table for rich to print. Its texts are no markup: a name may have brackets."""
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


def list_item(text: str) -> RenderableType:
    """A line of a list, wrapped under itself."""
    grid = RichTable.grid()
    grid.add_row(Text("- "), Text(text))
    return Padding(grid, (0, 0, 0, 2))
