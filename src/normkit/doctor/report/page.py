"""A diagnosis as one HTML file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.doctor.report.layer_map import LayerCell, Row, layer_map, legend
from normkit.doctor.report.rule_page import Section, sections
from normkit.doctor.report.statistics_panels import Panel, panels
from normkit.doctor.report.summary import Group, facts, gap_sentence, groups, headline, share_of, share_text, shares_of
from normkit.doctor.rule import RULES
from normkit.figures.page import rendered, write_text
from normkit.figures.values import cell_text, setting_text
from normkit.finding import Finding
from normkit.named_layers import display_name

if TYPE_CHECKING:
    from normkit.doctor.diagnosis import Diagnosis

MOST_LAYERS = 12  # whose statistics are drawn at once, those with the largest share first; the others are folded


class FindingView(NamedTuple):
    """A finding as the template takes it."""

    layer: str
    share: str
    message: str
    evidence: list[tuple[str, str]]


class GroupView(NamedTuple):
    """The findings of one code, what to do, and the rule's page."""

    group: Group
    findings: list[FindingView]
    has_shares: bool
    page: list[Section]


class StatisticsView(NamedTuple):
    """A layer with its charts."""

    cell: LayerCell
    panels: list[Panel]


class Bar(NamedTuple):
    """A mode, what was measured in it, and how long its bar is: 0 to 100."""

    mode: str
    value: str
    length: float


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> Path:
    """Write the page; return its path."""
    return write_text(path, diagnosis_page(diagnosis))


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The page as text."""
    evidence, findings = diagnosis.evidence, diagnosis.findings
    layers = evidence.get("layers") or []
    rows = layer_map(layers, findings)
    drawn = _by_trouble(rows, layers)
    return rendered(
        "diagnosis.html",
        [],
        package="normkit.doctor.report",
        title=type(diagnosis.patient.model).__name__,
        headline=headline(findings),
        facts=facts(evidence),
        sentence=gap_sentence(evidence),
        bars=_bars(evidence.get("gap") or {}),
        rows=rows,
        has_shares=bool(shares_of(evidence)),
        legend=legend(),
        groups=[_group_view(group, shares_of(evidence)) for group in groups(findings)],
        statistics=drawn[:MOST_LAYERS],
        folded=drawn[MOST_LAYERS:],
        ids={view.cell.id for view in drawn},
    )


def _by_trouble(rows: Sequence[Row], layers: Sequence[Mapping[str, Any]]) -> list[StatisticsView]:
    """Layers with statistics, those with the largest shares of the gap first, then those with findings."""
    cells = {cell.id: cell for row in rows for cell in row.cells}
    found = [
        (layer.get("share") or 0.0, StatisticsView(cells[f"layer-{number}"], panels(layer)))
        for number, layer in enumerate(layers, 1)
    ]
    with_charts = [(share, view) for share, view in found if view.panels]
    with_charts.sort(key=lambda pair: (-pair[0], pair[1].cell.severity is None))
    return [view for _, view in with_charts]


def _bars(gap: Mapping[str, Any]) -> list[Bar]:
    """What was measured in each mode, against the largest of the three."""
    modes = {"training": "training mode", "evaluation": "evaluation", "recalibrated": "evaluation, recalibrated"}
    values = {words: gap[mode] for mode, words in modes.items() if gap.get(mode) is not None}
    sizes = {words: _size(value) for words, value in values.items()}
    largest = max(sizes.values(), default=0.0) or 1.0
    return [Bar(words, cell_text(value), 100 * sizes[words] / largest) for words, value in values.items()]


def _size(value: Any) -> float:
    """A bar's length before it is scaled; what is not a finite positive number has none."""
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0.0


def _group_view(group: Group, shares: Mapping[str, float]) -> GroupView:
    rule = RULES.get(group.code)
    page = [] if rule is None else sections(rule)
    views = [_finding_view(finding, shares) for finding in group.findings]
    return GroupView(group, views, any(view.share for view in views), page)


def _finding_view(finding: Finding, shares: Mapping[str, float]) -> FindingView:
    layer = "" if finding.layer is None else display_name(finding.layer)
    numbers = [(name.replace("_", " "), _value_text(value)) for name, value in finding.evidence.items()]
    return FindingView(layer, share_text(share_of(finding, shares)), finding.message, numbers)


def _value_text(value: Any) -> str:
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return cell_text(value) if is_plain else setting_text(value)
