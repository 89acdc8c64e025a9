"""A notebook as Markdown. It is kept without outputs; the site runs it and shows what its cells print and draw."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from code_run import run


class Cell(NamedTuple):
    """A part of a notebook: Markdown, or Python."""

    source: str
    is_code: bool

    @property
    def markdown(self) -> str:
        """The cell as a part of a page."""
        return _fenced("python", self.source) if self.is_code else self.source


def cells_of(notebook: str) -> list[Cell]:
    """Return the cells of a notebook, which is given as its file's text."""
    return [Cell("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(notebook)["cells"]]


def source_markdown(notebook: str) -> str:
    """Return a notebook as a page of text and code."""
    return "\n\n".join(cell.markdown for cell in cells_of(notebook))


def outcome_markdown(notebook: str, file: str) -> str:
    """Return the same page with what came of running it, and with the notebook itself to take away."""
    first, *others = cells_of(notebook)
    taken = f"This page is a notebook, run when the site was made: {{download}}`{file} <{file}>`."
    namespace: dict[str, Any] = {"__name__": "notebook"}
    return "\n\n".join([first.markdown, taken, *(part for cell in others for part in _with_outcome(cell, namespace))])


def _with_outcome(cell: Cell, namespace: dict[str, Any]) -> Iterator[str]:
    yield cell.markdown
    if cell.is_code:
        printed, value = run(cell.source, "a cell", namespace)
        if printed:
            yield _fenced("text", printed)
        if value is not None:
            yield _shown(value)


def _shown(value: Any) -> str:
    """What Jupyter shows of a value: its picture, or its text."""
    if not hasattr(value, "_repr_png_"):
        return _fenced("text", repr(value))
    titles = "; ".join(figure.title for figure in getattr(value, "figures", [value]))
    return f"![{titles}](data:image/png;base64,{base64.b64encode(value._repr_png_()).decode()})"


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
