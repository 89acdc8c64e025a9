"""The directive `record`: tables of measured numbers, read from a file, so that no page repeats a number by hand.

    ```{record} records/inception.json
    ```

The file is a JSON object: `tables`, each with `title`, `columns` and `rows`; and, where there is something to say,
`outcome` (the verdict), `run` (how it was measured, in one sentence), `reported` (the commit and date of the numbers)
and `notes` (paragraphs of Markdown). `tools/lab_record.py` writes one from the directory of a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from record_markdown import record_as_markdown


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("record", RecordDirective)
    return {"parallel_read_safe": True}
