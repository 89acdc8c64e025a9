"""How Sphinx builds the site. `make docs` needs no network, and neither does the site that it builds."""

import sys
import zlib
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx
from torch import nn

import normkit

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

project = "normkit"
author = "the normkit authors"
copyright = author
release = version = version_of("normkit")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "notebooks",
    "records",
    "rules",
]
exclude_patterns = ["inventories", "**/.ipynb_checkpoints"]
nitpicky = True
nitpick_ignore = [("py:class", "rich.console.Console")]
default_role = "code"  # in docstrings, `x` is code

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as the code writes them
autoclass_content = "class"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "normkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_math_renderer = "mathml"


def inventory(name: str) -> str:
    """A Sphinx inventory made from the kept list `inventories/NAME.txt`, so that links need no network to be found.

    Each line is `name domain:role uri`; a `$` at the end of the address is the name.
    """
    lines = (DOCS / "inventories" / f"{name}.txt").read_text().splitlines()
    entries = "".join(f"{what} {role} 1 {uri} -\n" for what, role, uri in map(str.split, lines))
    header = [
        "Sphinx inventory version 2",
        f"Project: {name}",
        "Version:",
        "The remainder of this file is compressed using zlib.",
    ]
    path = DOCS.parent / "build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"# {line}\n" for line in header).encode() + zlib.compress(entries.encode()))
    return str(path)


intersphinx_mapping = {
    "python": ("https://docs.python.org/3", inventory("python")),
    "torch": ("https://docs.pytorch.org/docs/stable", inventory("torch")),
}


def show_public_base(app: Sphinx, name: str, cls: type, options: object, bases: list[type | str]) -> None:
    """Name as base the first class above that readers know, rather than the shared parts in between."""
    known = (f":py:class:`{name}`" for base in cls.__mro__[1:] if (name := public_name(base)))
    bases[:] = [*known][:1] or cls.__bases__


def public_name(cls: type) -> str | None:
    """The name of a class of normkit or of torch.nn by which users import it."""
    homes = [package.__name__ for package in (normkit, nn) if getattr(package, cls.__name__, None) is cls]
    return f"{homes[0]}.{cls.__name__}" if homes else None


def show_formulas_as_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Mark the indented blocks of a docstring, which are formulas, as literal. No blank line comes before a section."""
    for i in range(len(lines) - 1, 1, -1):
        if lines[i].startswith("    ") and not lines[i - 1].strip() and not lines[i - 2].startswith(" "):
            lines[i:i] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Connect what this file adds to autodoc."""
    app.connect("autodoc-process-bases", show_public_base)
    app.connect("autodoc-process-docstring", show_formulas_as_code, priority=400)  # before napoleon
