"""A record of measured numbers as Markdown; `records` says what is in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def record_as_markdown(record: dict[str, Any], only: str | None = None) -> str:
    """Return verdict, tables, notes and provenance of a record; `only` is the title of one table."""
    tables = [table for table in record["tables"] if only in (None, table["title"])]
    if not tables:
        raise ValueError(f"no table {only!r}; there are {[table['title'] for table in record['tables']]}")
    parts = [*_verdict(record), *(line for table in tables for line in _table(table)), *record.get("notes", ())]
    return "\n\n".join([*parts, *_provenance(record)])


def _verdict(record: dict[str, Any]) -> Iterator[str]:
    if "outcome" in record:
        yield f"Verdict: **{record['outcome']}**."


def _table(table: dict[str, Any]) -> Iterator[str]:
    if table["title"]:
        yield f"**{table['title']}**"
    rule = ["---"] * len(table["columns"])
    yield "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in [table["columns"], rule, *table["rows"]])


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def _provenance(record: dict[str, Any]) -> Iterator[str]:
    words = [record[key] for key in ("run", "reported") if key in record]
    if words:
        yield f"*Measured: {' '.join(words)}*"
