"""`normkit data`: the sets that experiments run on, and how to get them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from normkit.cli.options import Format
from normkit.lab import data
from normkit.lab.data.download import DownloadProgress

data_app = typer.Typer(name="data", help="The sets that experiments run on.", no_args_is_help=True)


@data_app.command("list")
def list_sets(format: Format = "text") -> None:
    """Show every set that has a name, and where it is."""
    found = data.available()
    if format == "json":
        print(json.dumps([entry._asdict() for entry in found], indent=2))
        return
    for entry in found:
        print(f"{entry.name:<15}{entry.size / 1e6:>6.1f} MB  {entry.what}")
        print(f"{'':<26}{entry.where or f'not here: normkit data get {entry.name}'}")


@data_app.command("get")
def get_set(
    name: Annotated[str, typer.Argument(help="A name of `normkit data list`.", show_default=False)],
    source: Annotated[
        str | None,
        typer.Option(
            help="local, debian, web, npm, an address on the web, or the path of a folder or an archive.",
            show_default="what is here; else each in this order",
        ),
    ] = None,
    format: Format = "text",
) -> None:
    """Bring a set onto this machine, check every byte of it, and print the file it is in."""
    with _shown() as progress:
        path = data.get(name, source, progress)
    print(json.dumps({"name": name, "path": str(path)}) if format == "json" else path)


@contextmanager
def _shown() -> Iterator[DownloadProgress | None]:
    """A bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("looking", total=None)

        def show(what: str, done: int, total: int | None) -> None:
            bars.update(task, description=what.rpartition("/")[2], completed=done, total=total)

        yield show
