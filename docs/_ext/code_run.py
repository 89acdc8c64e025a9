"""Running the Python of pages, for the site and for the tests."""

import ast
import contextlib
import io
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What a block printed, and the value of the expression that it ends with, if it ends with one."""

    printed: str
    value: Any


def run(code: str, file: str, namespace: dict[str, Any]) -> Outcome:
    """Run a block with these names, to which it adds its own. `file` is what a traceback calls it."""
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, file, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), file, "eval"), namespace) if last else None
    return Outcome(printed.getvalue(), value)
