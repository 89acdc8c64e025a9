"""The directive `record`: tables of measured numbers, read from a file, so that no page repeats a number by hand.

    ```{record} records/inception.json
    ```

The file is a JSON object: `tables`, each with `title`, `columns` and `rows`; and, where there is something to say,
`claim`, `outcome` (the verdict), `certainty` (how sure it is), `reasons` (for it, a list), `picture` (its `file`,
beside this one, and `title`), `run` (how it was measured, in one sentence), `reported` (the commit and date of the
numbers) and `notes` (paragraphs of Markdown). `tools/lab_record.py` writes one from the directory of a run. The
directive `verdicts` lists the claims and verdicts of several, and how sure these are:

    ```{verdicts} records
    landscape noisy-bn
    ```
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from record_markdown import record_as_markdown, verdicts_as_markdown


class _Records(SphinxDirective):
    """Markdown made from records, as a part of the page."""

    def read(self, file: str) -> dict[str, Any]:
        """A record; the page is made again when it changes."""
        relative, absolute = self.env.relfn2path(file)
        self.env.note_dependency(relative)
        record: dict[str, Any] = json.loads(Path(absolute).read_text())
        return record

    def shown(self, markdown: str) -> list[nodes.Node]:
        """What it is on the page."""
        container = nodes.container(classes=["record"])
        self.state.nested_parse(StringList(markdown.splitlines(), self.env.docname), 0, container)
        return container.children


class RecordDirective(_Records):
    """Shows a record, or of one with several tables the one whose title is given."""

    required_arguments = 1
    option_spec: ClassVar = {"table": str}

    def run(self) -> list[nodes.Node]:
        """Parse the record as a part of the page."""
        file = self.arguments[0]
        folder = file[: file.rfind("/") + 1]
        return self.shown(record_as_markdown(self.read(file), self.options.get("table"), folder))


class VerdictsDirective(_Records):
    """Lists what experiments claim and what became of it: a folder of records, and their names below it."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse the list as a part of the page."""
        folder, names = self.arguments[0], " ".join(self.content).split()
        return self.shown(verdicts_as_markdown({name: self.read(f"{folder}/{name}.json") for name in names}))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("record", RecordDirective)
    app.add_directive("verdicts", VerdictsDirective)
    return {"parallel_read_safe": True}
