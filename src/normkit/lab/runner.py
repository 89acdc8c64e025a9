"""Run the trials of experiments, side by side if there are several cores, in a directory that one process owns."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from normkit.environment import count_cores
from normkit.errors import NormkitError
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.locks import lock
from normkit.lab.plan import RunPlan, check_plan, read_plan, write_plan
from normkit.lab.progress import EVERY, Progress
from normkit.lab.trial import RunOptions, is_ended, run_trial, trial_paths

RUN_LOCK = ".lock"  # held by the process that runs the trials
WORKERS = ".workers"  # shared by the processes that it starts
_DYING = 5.0  # seconds in which the workers of a run that was killed notice it, and end


class TrialError(NormkitError, RuntimeError):
    """A trial that failed, or the process that ran it."""


class BusyError(NormkitError, RuntimeError):
    """A directory that another process is writing to."""


def run(
    plan: RunPlan,
    options: RunOptions,
    jobs: int | None = None,
    progress: Progress | None = None,
    only: Sequence[str] = (),
) -> None:
    """Run all trials of a plan, or `only` some experiments', that have not ended.

    If interrupted, what was done is kept and can be resumed.
    """
    progress = progress or Progress(quiet=True)
    directory, resume = options.directory, options.resume
    if resume:
        read_plan(directory)  # before a directory is made where there was none
    with locked(directory):
        (check_plan if resume else write_plan)(plan, directory)
        trials = plan.trials(only)
        left = [trial for trial in trials if not (resume and is_ended(trial_paths(trial, directory)[0]))]
        jobs = min(jobs or count_cores(), max(1, len(left)))
        with progress.of(trials, left):
            if jobs == 1:
                _run_here(left, options, progress)
            else:
                _run_in_workers(left, options, jobs, progress)


def _run_here(trials: Sequence[Trial], options: RunOptions, progress: Progress) -> None:
    for trial in trials:
        with _threads(1):  # as in a worker: the number of threads may change the last digit of a convolution

            def notify(step: int, steps: int, accuracy: float | None, trial: Trial = trial) -> None:
                progress.step(trial, step, steps, accuracy)

            run_trial(experiment_named(trial.experiment), trial, options, notify)
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
    with _locked(options.directory / WORKERS, shared=True):
        for trial in iter(todo.get, None):
            failure = _failure(trial, options, _StepReporter(messages, trial))
            messages.put(("end", trial) if failure is None else ("failed", trial, failure))


def _failure(trial: Trial, options: RunOptions, notify: _StepReporter) -> str | None:
    """Run a trial; return what went wrong, if anything did."""
    try:
        run_trial(experiment_named(trial.experiment), trial, options, notify)
    except NormkitError as error:
        return str(error)
    except OSError as error:
        return disk_trouble(error)
    except Exception:
        return traceback.format_exc()
    return None


class _StepReporter:
    """Reports a trial's steps, at most as often as they are shown: a message costs as much as a small step.

    Ends the process if its parent was killed: no other process reads the messages.
    """

    def __init__(self, messages: Any, trial: Trial) -> None:
        self._messages, self._trial, self._reported = messages, trial, 0.0
        self._parent = multiprocessing.parent_process()

    def __call__(self, step: int, steps: int, accuracy: float | None) -> None:
        if self._parent is not None and os.getppid() != self._parent.pid:
            os._exit(1)  # at once: every complete line is on the disk
        now = time.monotonic()
        if now - self._reported >= EVERY or step == steps:
            self._reported = now
            self._messages.put(("step", self._trial, step, steps, accuracy))


def disk_trouble(error: OSError) -> str:
    """Say what to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return f"The disk is full ({error}). Nothing that was measured is lost: make room and resume with --resume."
    return f"{error}. What was measured before is kept: resume with --resume."


# ---- the directory


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to a run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / RUN_LOCK):
        with _locked(directory / WORKERS, wait=_DYING):  # workers of a run that was killed may still be writing
            pass
        yield


@contextmanager
def _locked(path: Path, shared: bool = False, wait: float = 0.0) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            lock(file, shared=shared, wait=wait)
        except OSError:
            raise BusyError(
                f"Another process is writing to {path.parent}. Wait for it, or choose another --out."
            ) from None
        yield
