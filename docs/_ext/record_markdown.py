"""A record of measured numbers as Markdown; `records` says what is in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def record_as_markdown(record: dict[str, Any], only: str | None = None, folder: str = "") -> str:
    """Return claim, verdict, picture, tables, notes and provenance of a record from a folder.

    `only` is the title of one table.
    """
    tables = [table for table in record["tables"] if only in (None, table["title"])]
    if not tables:
        raise ValueError(f"no table {only!r}; there are {[table['title'] for table in record['tables']]}")
    parts = [*_verdict(record), *_picture(record, folder), *(line for table in tables for line in _table(table))]
    return "\n\n".join([*parts, *record.get("notes", ()), *_provenance(record)])


def verdicts_as_markdown(records: dict[str, dict[str, Any]]) -> str:
    """A table of experiments by name, with their claims, their verdicts and how sure these are."""
    columns = ["experiment", "verdict", "how sure", "the claim"]
    rows = [
        [f"[`{name}`](#{name})", f"**{of['outcome']}**", of["certainty"], of["claim"]] for name, of in records.items()
    ]
    return "\n\n".join(_table({"title": "", "columns": columns, "rows": rows}))


def _verdict(record: dict[str, Any]) -> Iterator[str]:
    if "claim" in record:
        yield f"> {record['claim']}"
    if "outcome" in record:
        yield f"Verdict: **{record['outcome']}**{_how_sure(record)}."
    if "reasons" in record:
        yield "\n".join(f"- {reason}" for reason in record["reasons"])


def _how_sure(record: dict[str, Any]) -> str:
    return f" ({record['certainty']})" if record.get("certainty") else ""


def _picture(record: dict[str, Any], folder: str) -> Iterator[str]:
    if "picture" in record:
        yield f"![{record['picture']['title']}]({folder}{record['picture']['file']})"


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
