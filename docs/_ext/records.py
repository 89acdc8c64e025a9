"""The directive `record`: tables of measured numbers, read from a file, so that no page repeats a number by hand.

    ```{record} records/inception.json
    ```

The file is a JSON object: `tables`, each with `title`, `columns` and `rows`; and, where there is something to say,
`outcome` (the verdict), `run` (how it was measured, in one sentence), `reported` (the commit and date of the numbers)
and `notes` (paragraphs of Markdown). `tools/lab_record.py` writes one from the directory of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class RecordDirective(SphinxDirective):
    """Shows a record, or of one with several tables the one whose title is given."""

    required_arguments = 1
    option_spec: ClassVar = {"table": str}

    def run(self) -> list[nodes.Node]:
        """Parse the record as a part of the page."""
        relative, absolute = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        markdown = record_as_markdown(json.loads(Path(absolute).read_text()), self.options.get("table"))
        container = nodes.container(classes=["record"])
        self.state.nested_parse(StringList(markdown.splitlines(), absolute), 0, container)
        return container.children


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("record", RecordDirective)
    return {"parallel_read_safe": True}
