"""The progress of a run: bars with rates and the time left on a terminal, elsewhere a line for each ended trial."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from normkit.lab.experiment import Trial

EVERY = 0.1  # seconds between two updates of a bar


class Progress:
    """Shows the steps and ends of trials on stderr."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._all: TaskID | None = None
        self._shown = 0.0
        self._last: dict[str, float | None] = {}
        self._started = 0.0

    @contextmanager
    def of(self, trials: Sequence[Trial], left: Sequence[Trial]) -> Iterator[None]:
        """Show a run of these trials, of which some are left."""
        self._started = time.monotonic()
        if self._quiet or not self._console.is_terminal:
            yield
            return
        columns: list[Any] = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        with Bars(*columns, console=self._console) as self._bars:
            done = len(trials) - len(left)
            self._all = self._bars.add_task("trials", total=len(trials), completed=done, rate="", note="")
            yield
        self._bars = None

    def say(self, text: str) -> None:
        """Show a line of text."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, trial: Trial, step: int, steps: int, accuracy: float | None) -> None:
        """A trial has taken a step."""
        self._last[trial.name] = accuracy
        if self._bars is None or (time.monotonic() - self._shown < EVERY and step < steps):
            return
        self._shown = time.monotonic()
        if trial.name not in self._tasks:
            title = f"{trial.experiment}, {trial.arm.name}, seed {trial.seed}"
            self._tasks[trial.name] = self._bars.add_task(title, total=steps, completed=step, rate="", note="")
        task = self._tasks[trial.name]
        self._bars.update(task, completed=step, note=_note(accuracy))
        speed = self._bars.tasks[self._bars.task_ids.index(task)].speed
        self._bars.update(task, rate=f"{speed:.0f} steps/s" if speed else "")

    def end(self, trial: Trial) -> None:
        """A trial has ended."""
        if self._bars is not None and self._all is not None:
            self._bars.advance(self._all)
            if trial.name in self._tasks:
                self._bars.remove_task(self._tasks.pop(trial.name))
        elif not self._quiet:
            after = time.monotonic() - self._started
            note = _note(self._last.get(trial.name))
            print(f"{trial.name}: ended after {after:.0f} s{', ' + note if note else ''}", file=sys.stderr, flush=True)


def _note(accuracy: float | None) -> str:
    return "" if accuracy is None else f"accuracy {accuracy:.4f}"
