"""The map of a model's norm layers: a row for each part of the model, a cell for each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from normkit.doctor.report.summary import share_text, worst
from normkit.finding import Finding, Severity
from normkit.named_layers import display_name

LARGEST_ROW = 24  # cells, if the names of layers allow it
ONE_ROW = 8  # so few layers need no parts
_BOUNDS = (0.01, 0.05, 0.2, 0.5)  # shares of the gap at which the next color begins


class LayerCell(NamedTuple):
    """A norm layer on the map.

    Attributes:
        id: what links lead to.
        name: in the model.
        label: the part of the name that is not that of its row.
        kind: its class.
        share: its part of the gap, as text; empty if it is not known or too small to be colored.
        heat: 0 to 4, by its share.
        severity: of its worst finding; None if there is none.
        codes: those of its findings.
    """

    id: str
    name: str
    label: str
    kind: str
    share: str
    heat: int
    severity: Severity | None
    codes: list[str]


class Row(NamedTuple):
    """A part of the model."""

    title: str
    cells: list[LayerCell]


def legend() -> list[tuple[int, str]]:
    """Each color, and which shares it stands for."""
    marks = [f"{bound:.0%}" for bound in _BOUNDS]
    between = [f"{low} to {high}" for low, high in pairwise(marks)]
    return list(enumerate([f"under {marks[0]}", *between, f"{marks[-1]} and more"]))


def layer_map(layers: Sequence[Mapping[str, Any]], findings: Iterable[Finding]) -> list[Row]:
    """The layers of a diagnosis's evidence, in the order of the model."""
    by_layer: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.layer is not None:
            by_layer.setdefault(finding.layer, []).append(finding)
    depth = _depth([layer["name"] for layer in layers])
    rows: dict[str, list[LayerCell]] = {}
    for number, layer in enumerate(layers, 1):
        title = _part(layer["name"], depth)
        rows.setdefault(title, []).append(_cell(number, layer, title, by_layer.get(layer["name"], [])))
    return [Row(title, cells) for title, cells in rows.items()]


def heat(share: float | None) -> int:
    """How strongly a share is colored."""
    return 0 if share is None else sum(share >= bound for bound in _BOUNDS)


def _cell(number: int, layer: Mapping[str, Any], title: str, found: Sequence[Finding]) -> LayerCell:
    name, share = layer["name"], layer.get("share")
    return LayerCell(
        id=f"layer-{number}",
        name=display_name(name),
        label=name[len(title) :].lstrip(".") or display_name(name),
        kind=layer.get("class", ""),
        share=share_text(share) if heat(share) else "",
        heat=heat(share),
        severity=worst(finding.severity for finding in found) if found else None,
        codes=list(dict.fromkeys(finding.code for finding in found)),
    )


def _depth(names: Sequence[str]) -> int:
    """How many parts of a name make a row: the fewest with which no row is too long, if there is such a number."""
    if len(names) <= ONE_ROW:
        return 0
    most = max(name.count(".") for name in names)
    return next((depth for depth in range(1, most) if _longest_row(names, depth) <= LARGEST_ROW), most)


def _longest_row(names: Sequence[str], depth: int) -> int:
    return max(Counter(_part(name, depth) for name in names).values())


def _part(name: str, depth: int) -> str:
    """The first parts of a name, and never its last."""
    return ".".join(name.split(".")[:-1][:depth])
