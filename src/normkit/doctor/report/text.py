"""A diagnosis on a terminal: what was found, in the order of what it costs, and what to do about it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from normkit.doctor.report.summary import facts, gap_sentence, groups, headline, share_of, share_text, shares_of
from normkit.figures.terminal import list_item
from normkit.finding import Finding, Severity
from normkit.named_layers import display_name

if TYPE_CHECKING:
    from normkit.doctor.diagnosis import Diagnosis

MOST_LAYERS = 10  # of one code that are listed; `findings` has all
WIDTH = 120  # columns, where the output is not a terminal
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def plain_text(diagnosis: Diagnosis, width: int = WIDTH) -> str:
    """The report without colors."""
    return _printed(terminal_report(diagnosis), width)


def findings_text(findings: Sequence[Finding], looked_at: str, width: int = WIDTH) -> str:
    """The same of findings alone, such as those of a ledger; `looked_at` says what they are about."""
    return _printed(Group(*_parts(findings, looked_at, {})), width)


def terminal_report(diagnosis: Diagnosis) -> RenderableType:
    """Return the report for rich to print."""
    return Group(*_parts(diagnosis.findings, facts(diagnosis.evidence), diagnosis.evidence))


def _printed(report: RenderableType, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None, highlight=False).print(report)
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def _parts(findings: Sequence[Finding], looked_at: str, evidence: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{headline(findings)} in {looked_at}".capitalize(), style="bold")
    sentence = gap_sentence(evidence)
    if sentence:
        yield Text(sentence)
    if not findings:
        return
    yield _table(findings, shares_of(evidence))
    for group in groups(findings):
        if len(group.findings) > MOST_LAYERS:
            yield Text(f"{group.code} {group.name}: {len(group.findings) - MOST_LAYERS} more.")
    yield Text("What to do:")
    yield from (list_item(f"{group.code}: {remedy}") for group in groups(findings) for remedy in group.remedies)


def _table(findings: Sequence[Finding], shares: Mapping[str, float]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("severity")
    table.add_column("code")
    table.add_column("layer", overflow="fold", max_width=36)
    table.add_column("of the gap", justify="right")
    table.add_column("what was found", overflow="fold", ratio=1)
    listed: Counter[str] = Counter()
    for finding in findings:
        listed[finding.code] += 1
        if listed[finding.code] <= MOST_LAYERS:
            table.add_row(*_cells(finding, shares))
    return table


def _cells(finding: Finding, shares: Mapping[str, float]) -> list[Text]:
    # Texts and no markup: names such as blocks[0] have brackets.
    return [
        Text(finding.severity, style=_STYLES[finding.severity]),
        Text(finding.code),
        Text("" if finding.layer is None else display_name(finding.layer)),
        Text(share_text(share_of(finding, shares))),
        Text(f"{finding.name}: {finding.message}"),
    ]
