"""One bar for work of a known or unknown length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def shown_bar(what: str, total: int | None, console: Console | None) -> Iterator[Callable[[int], None]]:
    """A function to call with what is done so far: it moves a bar on a terminal, and does nothing elsewhere."""
    if console is None or not console.is_terminal:
        yield lambda done: None
        return
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda done: bars.update(bar, completed=done)
