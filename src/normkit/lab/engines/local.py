"""Trials on this machine: in this process, or in several that it starts."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from normkit.environment import count_cores
from normkit.lab.engines.engine import Engine, StepReporter, TrialError, failure_of, run_named
from normkit.lab.experiment import Trial
from normkit.lab.locks import working_in
from normkit.lab.progress import Progress
from normkit.lab.trial import RunOptions


class LocalEngine(Engine):
    """Runs trials in processes, one for each core unless told otherwise; a single one in the caller's."""

    def run(self, trials: Sequence[Trial], options: RunOptions, jobs: int | None, progress: Progress) -> None:
        """Run trials to their ends."""
        jobs = min(jobs or count_cores(), max(1, len(trials)))
        if jobs == 1:
            _run_here(trials, options, progress)
        else:
            _run_in_workers(trials, options, jobs, progress)


def _run_here(trials: Sequence[Trial], options: RunOptions, progress: Progress) -> None:
    for trial in trials:
        with _threads(1):
            run_named(trial, options, partial(progress.step, trial))
        progress.end(trial)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- workers


def _run_in_workers(trials: Sequence[Trial], options: RunOptions, jobs: int, progress: Progress) -> None:
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    messages: Any = context.Queue()
    for item in (*trials, *[None] * jobs):  # None: no trial is left
        todo.put(item)
    workers = [context.Process(target=_work, args=(todo, messages, options), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        _listen(messages, workers, len(trials), progress)
    finally:
        for worker in workers:
            worker.terminate()  # checkpoints are whole at any moment
            worker.join()


def _listen(messages: Any, workers: Sequence[BaseProcess], trials: int, progress: Progress) -> None:
    """Pass the workers' messages on until every trial has ended."""
    while trials:
        try:
            kind, trial, *rest = messages.get(timeout=1.0)
        except queue.Empty:
            _check_alive(workers)
            continue
        if kind == "step":
            progress.step(trial, *rest)
        elif kind == "end":
            progress.end(trial)
            trials -= 1
        else:
            raise TrialError(f"{trial.name} failed: {rest[0]}")


def _check_alive(workers: Sequence[BaseProcess]) -> None:
    dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
    if dead:
        raise TrialError(
            f"A process that ran trials was ended from outside (exit code {dead[0]}). Resume the run with --resume."
        )


def _work(todo: Any, messages: Any, options: RunOptions) -> None:
    """Run one trial after another, with one thread."""
    torch.set_num_threads(1)
    with working_in(options.directory):
        for trial in iter(todo.get, None):
            failure = failure_of(partial(run_named, trial, options, _WorkerNotify(messages, trial)))
            messages.put(("end", trial) if failure is None else ("failed", trial, failure))


class _WorkerNotify:
    """Reports a trial's steps to the parent.

    Ends the process if its parent was killed: no other process reads the messages.
    """

    def __init__(self, messages: Any, trial: Trial) -> None:
        self._report = StepReporter(lambda *step: messages.put(("step", trial, *step)))
        self._parent = multiprocessing.parent_process()

    def __call__(self, step: int, steps: int, accuracy: float | None) -> None:
        if self._parent is not None and os.getppid() != self._parent.pid:
            os._exit(1)  # at once: every complete line is on the disk
        self._report(step, steps, accuracy)
