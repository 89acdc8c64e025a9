"""What probes recorded, for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from normkit.figures.figure import Table
from normkit.figures.terminal import rich_table
from normkit.json_lines import Line
from normkit.jsonable import jsonable

_WIDTH = 160  # columns, where the output is not a terminal
_PLACE = ("step", "probe", "layer")


def print_records(records: Sequence[Line]) -> None:
    """A table for each probe: the last values of every layer."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for probe, layers in last_values(records).items():
        console.print(rich_table(_table(f"{probe}, step {_last_step(records, probe):,}", layers)))


def as_document(target: str, records: Sequence[Line], out: Path | None, report: Path | None) -> dict[str, Any]:
    """The last values by probe and layer, in JSON's types."""
    written = {"out": out and str(out), "report": report and str(report)}
    steps = 1 + max(record["step"] for record in records)
    return {
        "command": "probe",
        "target": target,
        "steps": steps,
        "probes": jsonable(last_values(records)),
        **written,
    }


def last_values(records: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """What was measured last, by probe, layer and number."""
    found: dict[str, dict[str, Line]] = {}
    for record in records:
        numbers = {key: value for key, value in record.items() if key not in _PLACE}
        found.setdefault(record["probe"], {})[record["layer"]] = numbers
    return found


def _table(title: str, layers: dict[str, Line]) -> Table:
    keys = list(dict.fromkeys(key for numbers in layers.values() for key in numbers))
    rows = [[name or "(the model itself)", *map(numbers.get, keys)] for name, numbers in layers.items()]
    return Table(title, ["layer", *keys], rows)


def _last_step(records: Sequence[Line], probe: str) -> int:
    return max(int(record["step"]) for record in records if record["probe"] == probe)
