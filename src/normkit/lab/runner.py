"""Run the trials of experiments, side by side where cores allow, in a directory that only one process writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normkit.environment import count_cores
from normkit.errors import ArgumentError, NormkitError
from normkit.lab.experiment import Scale, Trial
from normkit.lab.experiments import experiment_named, names_in
from normkit.lab.progress import EVERY, Progress
from normkit.lab.record import RECORDS
from normkit.lab.trial import is_ended, run_trial, trial_paths

PLAN = "run.json"
WORKERS = ".workers"  # locked by those that are at work


class TrialError(NormkitError, RuntimeError):
    """A trial that ended in an error of its own."""


class BusyError(NormkitError, RuntimeError):
    """A directory that another process is writing to."""


class Plan(NamedTuple):
    """What is to be run: all that `--resume` needs to know."""

    name: str  # of an experiment or a set of them
    scale: Scale
    data: str | None = None  # None: each experiment's own
    seeds: int | None = None  # None: each experiment's own

    def trials(self) -> list[Trial]:
        """Every arm with every seed: first one seed of all arms, then the next."""
        experiments = [experiment_named(name) for name in names_in(self.name)]
        seeds = {experiment.name: self.seeds or experiment.seeds[self.scale] for experiment in experiments}
        return [
            Trial(experiment.name, arm, seed, self.scale, self.data or experiment.data)
            for seed in range(max(seeds.values()))
            for experiment in experiments
            if seed < seeds[experiment.name]
            for arm in experiment.arms(self.scale)
        ]


def run(
    plan: Plan,
    directory: Path,
    resume: bool,
    jobs: int | None = None,
    progress: Progress | None = None,
    tensorboard: bool = False,
) -> None:
    """Run all trials of a plan that have not ended; interrupted, what was done is kept and can be resumed."""
    progress = progress or Progress(quiet=True)
    if resume:
        read_plan(directory)  # before a directory is made where there was none
    with locked(directory):
        _agree(plan, directory, resume)
        trials = plan.trials()
        left = [trial for trial in trials if not (resume and is_ended(trial_paths(trial, directory)[0]))]
        jobs = min(jobs or count_cores(), max(1, len(left)))
        with progress.of(trials, left):
            if jobs == 1:
                _run_here(left, directory, resume, progress, tensorboard)
            else:
                _run_beside(left, directory, resume, jobs, progress, tensorboard)


def _run_here(trials: Sequence[Trial], directory: Path, resume: bool, progress: Progress, tensorboard: bool) -> None:
    for trial in trials:
        with _threads(1):  # as beside others: the number of threads may change the last digit of a convolution
            run_trial(
                experiment_named(trial.experiment),
                trial,
                directory,
                resume,
                lambda *step, trial=trial: progress.step(trial, *step),
                tensorboard,
            )
        progress.end(trial)


# ---- side by side


def _run_beside(
    trials: Sequence[Trial], directory: Path, resume: bool, jobs: int, progress: Progress, tensorboard: bool
) -> None:
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    said: Any = context.Queue()
    for trial in trials:
        todo.put(trial)
    for _ in range(jobs):
        todo.put(None)
    how = (todo, said, directory, resume, tensorboard)
    workers = [context.Process(target=_work, args=how, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        _listen(said, workers, len(trials), progress)
    finally:
        for worker in workers:
            worker.terminate()  # checkpoints are whole at any moment
            worker.join()


def _listen(said: Any, workers: Sequence[BaseProcess], trials: int, progress: Progress) -> None:
    """Pass on what workers say, until every trial has ended."""
    while trials:
        try:
            kind, trial, *rest = said.get(timeout=1.0)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
            if dead:
                raise TrialError(
                    f"A process that ran trials was ended from outside (exit code {dead[0]}). Go on with --resume."
                ) from None
            continue
        if kind == "step":
            progress.step(trial, *rest)
        elif kind == "end":
            progress.end(trial)
            trials -= 1
        else:
            raise TrialError(f"{trial.name} failed: {rest[0]}")


def _work(todo: Any, said: Any, directory: Path, resume: bool, tensorboard: bool) -> None:
    """A worker: one thread, one trial after another."""
    torch.set_num_threads(1)
    with _locked(directory / WORKERS, fcntl.LOCK_SH):
        _work_off(todo, said, directory, resume, tensorboard)


def _work_off(todo: Any, said: Any, directory: Path, resume: bool, tensorboard: bool) -> None:
    for trial in iter(todo.get, None):
        try:
            run_trial(experiment_named(trial.experiment), trial, directory, resume, _Teller(said, trial), tensorboard)
        except NormkitError as error:
            said.put(("failed", trial, str(error)))
        except OSError as error:
            said.put(("failed", trial, disk_trouble(error)))
        except Exception:
            said.put(("failed", trial, traceback.format_exc()))
        else:
            said.put(("end", trial))


class _Teller:
    """Tells of a trial's steps, but not more often than anybody looks: a message costs as much as a small step.

    When the process that listens was killed, there is nobody to work for.
    """

    def __init__(self, said: Any, trial: Trial) -> None:
        self._said, self._trial, self._told = said, trial, 0.0
        self._parent = multiprocessing.parent_process()

    def __call__(self, step: int, steps: int, accuracy: float | None) -> None:
        if self._parent is not None and os.getppid() != self._parent.pid:
            os._exit(1)  # at once: what is written is whole
        now = time.monotonic()
        if now - self._told >= EVERY or step == steps:
            self._told = now
            self._said.put(("step", self._trial, step, steps, accuracy))


def disk_trouble(error: OSError) -> str:
    """What to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return f"The disk is full ({error}). Nothing that was measured is lost: make room and go on with --resume."
    return f"{error}. What was measured before is kept: go on with --resume."


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- the directory


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have a run's directory to oneself; the system lets go of it whatever happens to the process."""
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / ".lock", fcntl.LOCK_EX):
        with _locked(directory / WORKERS, fcntl.LOCK_EX):  # none is left of a run that was killed
            pass
        yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(
                f"Another process is writing to {path.parent}. Wait for it, or take another --out."
            ) from None
        yield


def _agree(plan: Plan, directory: Path, resume: bool) -> None:
    """Write down what is run; with `resume`, it must be what was written down."""
    path = directory / PLAN
    if not resume:
        if (directory / RECORDS).exists():
            raise ArgumentError(
                f"{directory} holds a run already. Add --resume to go on with it, or take another --out."
            )
        path.write_text(json.dumps(plan._asdict(), indent=2) + "\n")
        return
    found = read_plan(directory)
    if found != plan:
        differs = ", ".join(
            f"{key} {getattr(found, key)!r}" for key in plan._fields if getattr(found, key) != getattr(plan, key)
        )
        raise ArgumentError(f"The run in {directory} has {differs}: --resume goes on with just that run.")


def read_plan(directory: Path) -> Plan:
    """What the run in a directory is."""
    try:
        return Plan(**json.loads((directory / PLAN).read_text()))
    except (OSError, ValueError, TypeError):
        raise ArgumentError(
            f"{directory} holds no run that could be resumed: there is no {PLAN} of one in it."
        ) from None
