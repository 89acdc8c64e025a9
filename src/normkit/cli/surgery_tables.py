"""What a verb did, for people and for programs."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normkit.jsonable import jsonable
from normkit.surgery.result import Change, Parity, Surgery

_WIDTH = 160  # columns, where the output is not a terminal


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
    """What was changed, what was not and the parity, in JSON's types."""
    parity = surgery.parity
    return {
        "changed": [change._asdict() for change in surgery.changed],
        "skipped": [change._asdict() for change in surgery.skipped],
        "parity": None if parity is None else jsonable(parity._asdict()),
    }


def _table(surgery: Surgery) -> Table:
    table = Table("", "layer", "what", "why", title=f"changed {len(surgery.changed)}, skipped {len(surgery.skipped)}")
    table.title_justify = "left"
    for done, changes in (("changed", surgery.changed), ("skipped", surgery.skipped)):
        for change in changes:
            table.add_row(done, *_cells(change))
    return table


def _cells(change: Change) -> list[str]:
    # Names such as blocks[0] have brackets, which rich would take for markup.
    return [escape(text) for text in (change.layer or "(the model itself)", change.what, change.why)]


def _parity_line(parity: Parity) -> str:
    first = parity.first_layer
    where = "" if first is None else f", first at {first or 'the model itself'}"
    return f"Outputs on the example moved by at most {parity.max_abs:.3g} ({parity.max_rel:.3g} relative{where})."
