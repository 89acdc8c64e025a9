"""Notebooks are kept without outputs; the site runs them."""

import base64
import json

from normkit.figures import Curve, Figure
from notebook_markdown import outcome_markdown


def test_the_site_shows_what_cells_print_and_draw():
    figure = Figure("A title", "steps", "loss", [Curve("a", [0, 1], [1, 2])])
    drawing = ["from normkit.figures import *\n", repr(figure)]
    picture = base64.b64encode(figure._repr_png_()).decode()
    text = notebook("# Title", ["print(1)\n", "2"], drawing, "The end.")
    assert outcome_markdown(text, "n.ipynb").split("\n\n") == [
        "# Title",
        "This page is a notebook, run when the site was made: {download}`n.ipynb <n.ipynb>`.",
        "```python\nprint(1)\n2\n```",
        "```text\n1\n```",
        "```text\n2\n```",
        f"```python\n{''.join(drawing)}\n```",
        f"![A title](data:image/png;base64,{picture})",
        "The end.",
    ]


def notebook(*sources):
    """Markdown is a text, code a list of lines."""
    cells = [{"cell_type": "code" if isinstance(s, list) else "markdown", "source": s} for s in sources]
    return json.dumps({"cells": cells})
