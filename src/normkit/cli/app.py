"""The program `normkit`. Exit codes: 0 fine, 1 found something, 2 could not run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from normkit.cli.bench import bench
from normkit.cli.data import data_app
from normkit.cli.env import env
from normkit.cli.lab import lab_app
from normkit.cli.surgery import convert, fold, freeze, recalibrate
from normkit.errors import NormkitError

app = typer.Typer(
    name="normkit",
    help="Normalization for PyTorch that can be trusted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(env)
app.command()(bench)
for verb in (fold, convert, freeze, recalibrate):
    app.command()(verb)
app.add_typer(lab_app, name="lab")
app.add_typer(data_app, name="data")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what normkit raises on purpose is a message and not a traceback."""
    try:
        app(arguments)
    except NormkitError as error:
        print(f"normkit: {error}", file=sys.stderr)
        raise SystemExit(2) from None
