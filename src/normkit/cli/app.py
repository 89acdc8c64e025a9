"""The program `normkit`. Exit codes: 0 fine, 1 found something, 2 could not run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from normkit.cli.bench import bench
from normkit.cli.data import data_app
from normkit.cli.doctor import doctor
from normkit.cli.env import env
from normkit.cli.lab import lab_app
from normkit.cli.probe import probe
from normkit.cli.surgery import convert, fold, freeze, recalibrate
from normkit.errors import NormkitError

app = typer.Typer(
    name="normkit",
    help="Normalization for PyTorch that can be trusted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"normkit {metadata.version('normkit')}")
        raise typer.Exit


@app.callback()
def _normkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Normalization for PyTorch that can be trusted."""


app.command()(env)
app.command()(bench)
for verb in (fold, convert, freeze, recalibrate):
    app.command()(verb)
app.command()(doctor)
app.command()(probe)
app.add_typer(lab_app, name="lab")
app.add_typer(data_app, name="data")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that normkit raises on purpose is printed as a message, without a traceback."""
    try:
        app(arguments)
    except NormkitError as error:
        print(f"normkit: {error}", file=sys.stderr)
        raise SystemExit(2) from None
