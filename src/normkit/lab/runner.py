"""Run the trials of an experiment, side by side where cores allow, in a directory that only one process writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
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
from normkit.lab.experiments import experiment_named
from normkit.lab.progress import EVERY, Progress
from normkit.lab.record import RECORDS
from normkit.lab.trial import is_ended, run_trial, trial_paths

PLAN = "run.json"


class TrialError(NormkitError, RuntimeError):
    """A trial that ended in an error of its own."""


class BusyError(NormkitError, RuntimeError):
    """A directory that another process is writing to."""


class Plan(NamedTuple):
    """What is to be run: all that `--resume` needs to know."""

    experiment: str
    scale: Scale
    data: str
    seeds: int

    def trials(self) -> list[Trial]:
        """Every arm with every seed: first one seed of all arms, then the next."""
        arms = experiment_named(self.experiment).arms(self.scale)
        return [Trial(self.experiment, arm, seed, self.scale, self.data) for seed in range(self.seeds) for arm in arms]


def run(plan: Plan, directory: Path, resume: bool, jobs: int | None = None, progress: Progress | None = None) -> None:
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
                _run_here(left, directory, resume, progress)
            else:
                _run_beside(left, directory, resume, jobs, progress)


def _run_here(trials: Sequence[Trial], directory: Path, resume: bool, progress: Progress) -> None:
    for trial in trials:
        with _threads(1):  # as beside others: the number of threads may change the last digit of a convolution
            run_trial(
                experiment_named(trial.experiment),
                trial,
                directory,
                resume,
                lambda *step, trial=trial: progress.step(trial, *step),
            )
        progress.end(trial)


# ---- side by side


def _run_beside(trials: Sequence[Trial], directory: Path, resume: bool, jobs: int, progress: Progress) -> None:
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    said: Any = context.Queue()
    for trial in trials:
        todo.put(trial)
    for _ in range(jobs):
        todo.put(None)
    workers = [context.Process(target=_work, args=(todo, said, directory, resume), daemon=True) for _ in range(jobs)]
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


def _work(todo: Any, said: Any, directory: Path, resume: bool) -> None:
    """A worker: one thread, one trial after another."""
    torch.set_num_threads(1)
    for trial in iter(todo.get, None):
        try:
            run_trial(experiment_named(trial.experiment), trial, directory, resume, _Teller(said, trial))
        except NormkitError as error:
            said.put(("failed", trial, str(error)))
        except OSError as error:
            said.put(("failed", trial, disk_trouble(error)))
        except Exception:
            said.put(("failed", trial, traceback.format_exc()))
        else:
            said.put(("end", trial))


class _Teller:
    """Tells of a trial's steps, but not more often than anybody looks: a message costs as much as a small step."""

    def __init__(self, said: Any, trial: Trial) -> None:
        self._said, self._trial, self._told = said, trial, 0.0

    def __call__(self, step: int, steps: int, accuracy: float | None) -> None:
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
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"Another process is writing to {directory}. Wait for it, or take another --out.") from None
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
