"""Every Python block of README.md and docs/**/*.md runs as it stands. Notebooks have tests of their own.

Conventions for the pages:
- The blocks marked `python` of one page run in order, in one namespace, in an empty directory, after
  `torch.manual_seed(0)`, with warnings as errors: a page imports and defines what it uses.
- A block marked `text` directly after a `python` block is what that block prints. `...` stands for any text.
- A page that needs a package which may be missing says `<!-- needs: timm -->` on a line of its own (several: commas),
  and is skipped without it. Pages that need a package which is installed aside, or long, are for the deep run.
- Python that does not run has no other mark to hide under: shell commands are `bash`, output alone is `text`.
"""

import doctest
import importlib
from pathlib import Path

import pytest

from code_run import run
from support.depth import thinned
from support.pages import NOTEBOOKS, PAGES, Block, blocks, name, needs, tokens

WITH_CODE = [page for page in PAGES if page not in NOTEBOOKS and any(blocks(page))]
ASIDE = frozenset({"opacus", "timm", "torchao"})  # see support/aside.py, which is not imported for nothing
SLOW = frozenset({"docs/tutorials/ship-a-resnet.md", "docs/kernels.md", "docs/lab/index.md"})
NOT_RUN = {"py", "python3", "pycon", "{code-block} python", "{doctest}"}


@pytest.mark.parametrize(
    "page", thinned(WITH_CODE, lambda page: ASIDE.isdisjoint(needs(page)) and name(page) not in SLOW), ids=name
)
def test_runs(page, namespace):
    if not ASIDE.isdisjoint(needs(page)):
        importlib.import_module("support.aside")
    for module in needs(page):
        pytest.importorskip(module, reason=f"{name(page)} needs {module}")
    for block in blocks(page):
        printed = run_block(block, page, namespace)
        if block.output is not None:
            assert_shown(block.output, printed)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_python_hides_under_another_mark(page):
    assert not [token.info for token in tokens(page) if token.type == "fence" and token.info.strip() in NOT_RUN]


def run_block(block: Block, page: Path, namespace: dict[str, object]) -> str:
    # Shifted to the lines of the page, so that a traceback shows them.
    return run("\n" * block.line + block.code, str(page), namespace).printed


def assert_shown(shown: str, printed: str) -> None:
    alike = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert alike, f"the page shows\n{shown}\nand the code prints\n{printed}"
