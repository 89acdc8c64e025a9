"""What a verb did, for people and for programs."""

from __future__ import annotations

import math
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normkit.surgery.result import Change, Parity, Surgery

_WIDTH = 160  # where the output is not a terminal, and has no width of its own


def print_surgery(surgery: Surgery) -> None:
    """A table of what was changed and what was not, and how far the outputs moved."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if surgery.changed or surgery.skipped:
        console.print(_table(surgery))
    if not surgery.changed:
        print("Nothing was changed.")
    if surgery.parity is not None:
        print(_parity_line(surgery.parity))


def as_document(surgery: Surgery) -> dict[str, Any]:
    """The same as plain values."""
    parity = surgery.parity
    return {
        "changed": [change._asdict() for change in surgery.changed],
        "skipped": [change._asdict() for change in surgery.skipped],
        "parity": None
        if parity is None
        else {
            "max_abs": _number(parity.max_abs),
            "max_rel": _number(parity.max_rel),
            "first_layer": parity.first_layer,
        },
    }


def _table(surgery: Surgery) -> Table:
    table = Table("", "layer", "what", "why", title=f"changed {len(surgery.changed)}, skipped {len(surgery.skipped)}")
    table.title_justify = "left"
    for done, changes in (("changed", surgery.changed), ("skipped", surgery.skipped)):
        for change in changes:
            table.add_row(done, *_cells(change))
    return table


def _cells(change: Change) -> list[str]:
    # Brackets are part of names such as blocks[0], and no markup.
    return [escape(text) for text in (change.layer or "(the model itself)", change.what, change.why)]


def _parity_line(parity: Parity) -> str:
    first = parity.first_layer
    where = "" if first is None else f", first at {first or 'the model itself'}"
    return f"Outputs on the example moved by at most {parity.max_abs:.3g} ({parity.max_rel:.3g} relative{where})."


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinity
