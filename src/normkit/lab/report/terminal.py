"""The findings of a run on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from normkit.figures.terminal import list_item, rich_table
from normkit.lab.findings import Findings, Outcome

_STYLES: dict[Outcome, str] = {"supported": "bold green", "contradicted": "bold red", "unclear": "bold yellow"}


def terminal_table(findings: Findings) -> RenderableType:
    """Return the verdict, its reasons and the tables, for rich to print."""
    return Group(*_parts(findings))


def _parts(findings: Findings) -> Iterator[RenderableType]:
    yield Text.assemble((findings.outcome, _STYLES[findings.outcome]), ": ", findings.claim)
    yield Text(findings.source, style="dim")
    yield from map(list_item, findings.reasons)
    for table in findings.tables:
        yield Text()
        yield rich_table(table)
        if table.note:
            yield Text(table.note, style="dim")
    if findings.notes:
        yield Text("\nBefore believing it:")
        yield from map(list_item, findings.notes)
