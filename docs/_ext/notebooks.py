"""Notebooks as pages: `.ipynb` is a source beside `.md`."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

from notebook_markdown import outcome_markdown


class NotebookParser(MystParser):
    """Runs a notebook and reads it as MyST Markdown."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document."""
        super().parse(outcome_markdown(inputstring, Path(document["source"]).name), document)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the suffix and its parser."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
