"""Notebooks are kept as they are opened, run as they stand, and find what they tell.

What they print and draw is not kept: the site runs them. In Jupyter, "Clear Outputs of All Cells" before saving, or
`jupyter nbconvert --clear-output --inplace docs/tutorials/NAME.ipynb`. The Python of solutions, in Markdown, runs too.
"""

import base64
import json
import re
from itertools import takewhile
from statistics import median

import pytest

from code_run import run
from normkit.figures import Curve, Figure
from notebook_markdown import outcome_markdown
from support.pages import NOTEBOOKS, ROOT, blocks, name

HOUR = ROOT / "docs" / "tutorials" / "batch-normalization.ipynb"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_is_a_notebook_without_outputs(path):
    text = path.read_text()
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"  # as Jupyter writes it
    as_run = ("metadata", "outputs", "execution_count")
    assert [cell["id"] for cell in notebook["cells"] if any(cell.get(key) for key in as_run)] == []
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids)
    assert [each for each in ids if not re.fullmatch(r"[a-z-]{1,64}", each)] == []  # a word on what the cell is


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_says_first_how_to_run_it(path):
    title = json.loads(path.read_text())["cells"][0]["source"]
    assert title[0].startswith("# ")
    assert {"    pip install 'normkit[lab]' jupyterlab\n", f"    jupyter lab {path.name}\n"} <= {*title}


def test_what_needs_no_images_runs(namespace):
    exact = [*takewhile(lambda block: "fashion-mini" not in block.code, blocks(HOUR))]
    assert len(exact) > 10
    run_all(exact, namespace)


@pytest.mark.deep
def test_runs_and_finds_what_it_tells(namespace):
    run_all(blocks(HOUR), namespace)
    (*_, plain), (*_, bn) = namespace["nets"].values()
    assert plain[100] + 0.2 < bn[100]  # accuracies after so many steps
    assert spread(namespace["quantiles"]["BN"]) < spread(namespace["quantiles"]["plain"])
    assert namespace["broken"] + 0.1 < min(namespace["in_training"], namespace["mended"])
    assert namespace["without_statistics"] + 0.1 < namespace["with_statistics"]
    for what in ("loss variation", "change of the gradient"):
        of = namespace["properties"][what]
        plain, bn = (median(map(of, records)) for records in namespace["landscapes"].values())
        assert bn < plain


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


def spread(records):
    medians = [record["q50"] for record in records]
    return max(medians) - min(medians)


def run_all(parts, namespace):
    for number, block in enumerate(parts, 1):
        run(block.code, f"block {number} of {HOUR.name}", namespace)
