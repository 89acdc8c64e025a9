"""Trials as tasks of a Ray cluster, whose nodes share the run's directory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from normkit.environment import count_cores
from normkit.errors import ArgumentError
from normkit.lab.engines.engine import Engine, StepReporter, TrialError, failure_of, run_named
from normkit.lab.engines.ray_cluster import ClusterError, connected
from normkit.lab.experiment import Trial
from normkit.lab.locks import held, working_in
from normkit.lab.progress import Progress
from normkit.lab.trial import RunOptions, trial_paths
from normkit.optional import required

MARK = ".cluster"  # a file in the run's directory by which a process knows that it sees the same directory
RETRIES = 3  # of a trial whose process was lost
_POLL = 0.2  # seconds between two looks at the progress
_SEEN = 5.0  # seconds in which a shared file system shows a new file
_LOST = 180.0  # seconds in which a process that the cluster has given up ends, or its locks do: NFS keeps them for 90


class RayEngine(Engine):
    """Runs trials on the cluster at RAY_ADDRESS; without one, on a cluster of this machine that ends with the run.

    A trial whose process or machine is lost is run again, from its last checkpoint.
    """

    def __init__(self, cpus_per_trial: float = 1.0) -> None:
        if not cpus_per_trial > 0:
            raise ArgumentError(f"--cpus-per-trial must be above 0; got {cpus_per_trial}.")
        self._ray = required("ray", "--engine ray", extra="ray")
        self._cpus = cpus_per_trial

    def run(self, trials: Sequence[Trial], options: RunOptions, jobs: int | None, progress: Progress) -> None:
        """Run trials to their ends."""
        if not trials:
            return
        options = options._replace(directory=options.directory.resolve())
        room = jobs or max(1, int(count_cores() / self._cpus))
        with (
            connected(self._ray, self._cpus * min(room, len(trials))),
            _marked(options.directory) as mark,
        ):
            self._check_room()
            sweep = _Sweep(self._ray, self._cpus, _Place(mark, Path.cwd()), options, progress)
            try:
                sweep.run(trials, jobs or len(trials))
            finally:
                sweep.cancel()

    def _check_room(self) -> None:
        """Refuse what no machine can run: the cluster would wait for one."""
        largest = max((node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]), default=0.0)
        if largest < self._cpus:
            raise ClusterError(
                f"--cpus-per-trial {self._cpus:g} needs a node with as many CPUs; the largest of this cluster has "
                f"{largest:g}. Ask for fewer, or add a node."
            )


class _Place(NamedTuple):
    """Where a trial runs as if it ran here."""

    mark: str
    folder: Path  # where relative paths of data begin


class _Sweep:
    """Trials on a cluster: those that wait, those that run, and how often each was lost."""

    def __init__(self, ray: Any, cpus: float, place: _Place, options: RunOptions, progress: Progress) -> None:
        self._ray, self._place, self._options, self._progress = ray, place, options, progress
        queues = required("ray.util.queue", "--engine ray", extra="ray")
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
        self._messages = queues.Queue(actor_options={"num_cpus": 0, "scheduling_strategy": strategy})
        self._task = ray.remote(num_cpus=cpus, max_retries=0)(_run_on_node)  # a lost one is told to resume
        self._running: dict[Any, Trial] = {}
        self._losses: dict[str, int] = {}

    def run(self, trials: Sequence[Trial], jobs: int) -> None:
        """Run all of them, at most `jobs` at a time."""
        waiting = deque(trials)
        with noticed_interrupts() as check:
            while waiting or self._running:
                check()
                while waiting and len(self._running) < jobs:
                    self._start(waiting.popleft(), self._options)
                ended, _ = self._ray.wait([*self._running], timeout=_POLL)
                self._show_steps()
                for task in ended:
                    self._settle(task, self._running.pop(task))

    def cancel(self) -> None:
        """End what still runs: checkpoints are whole at any moment."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            for task in self._running:
                self._ray.cancel(task, force=True)
            self._messages.shutdown(force=True)

    def _start(self, trial: Trial, options: RunOptions) -> None:
        task = self._task.options(name=trial.name).remote(trial, options, self._place, self._messages)
        self._running[task] = trial

    def _settle(self, task: Any, trial: Trial) -> None:
        """Note the end of a trial, start it again if its process was lost, or raise what went wrong."""
        errors = self._ray.exceptions
        try:
            failure = self._ray.get(task)
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            self._start_again(trial, error)
            return
        except errors.RayError as error:  # normkit is not installed there, say
            failure = str(error)
        if failure is not None:
            raise TrialError(f"{trial.name} failed: {failure}")
        self._progress.end(trial)

    def _start_again(self, trial: Trial, error: Exception) -> None:
        losses = self._losses[trial.name] = self._losses.get(trial.name, 0) + 1
        if losses > RETRIES:
            raise TrialError(
                f"The process of {trial.name} was lost {losses} times, the last time with: {error} Resume the run with "
                "--resume."
            )
        self._progress.say(f"{trial.name}: its process was lost; it continues from its last checkpoint")
        self._start(trial, self._options._replace(resume=True))

    def _show_steps(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # without the process that has them, steps are unseen
            for trial, *step in self._messages.get_nowait_batch(self._messages.qsize()):
                self._progress.step(trial, *step)


@contextlib.contextmanager
def noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a check that raises KeyboardInterrupt once more, if one was lost.

    Python drops what is raised in a destructor, and Ray's references have destructors that run at every step.
    """
    noticed: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def notice(number: int, frame: FrameType | None) -> None:
        noticed.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if noticed:
            raise KeyboardInterrupt

    is_ours = usual is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, notice)
    try:
        yield check
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, usual)


# ---- the directory that the nodes share


@contextlib.contextmanager
def _marked(directory: Path) -> Iterator[str]:
    """Put a mark into the run's directory, that processes elsewhere can look for."""
    mark = uuid.uuid4().hex
    (directory / MARK).write_text(mark)
    try:
        yield mark
    finally:
        (directory / MARK).unlink(missing_ok=True)


# ---- in a process of the cluster


def _run_on_node(trial: Trial, options: RunOptions, place: _Place, messages: Any) -> str | None:
    """Run a trial; return what went wrong, if anything did."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # another machine need not have the folder, if no path begins there
        os.chdir(place.folder)

    def report(*step: Any) -> None:
        with contextlib.suppress(Exception):  # a trial goes on when nobody sees its steps
            messages.put_nowait((trial, *step))

    return failure_of(partial(_run_alone, trial, options, place.mark, StepReporter(report)))


def _run_alone(trial: Trial, options: RunOptions, mark: str, notify: StepReporter) -> None:
    """Run a trial once no other process does: one that the cluster has given up may be alive, behind a cut network."""
    _check_directory(options.directory, mark)
    _, checkpoint = trial_paths(trial, options.directory)
    checkpoint.parent.mkdir(exist_ok=True)
    own = checkpoint.with_suffix(".lock")
    with working_in(options.directory), held(own, wait=_LOST):
        run_named(trial, options, notify)
        own.unlink(missing_ok=True)  # whoever still waits for it finds the trial ended


def _check_directory(directory: Path, mark: str) -> None:
    """Refuse to run where the run's directory is another one: records would be scattered over machines."""
    deadline = time.monotonic() + _SEEN
    while not _has_mark(directory, mark):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{os.uname().nodename} does not see the run's directory {directory}. All nodes of a cluster must "
                "share it: choose an --out on a file system that every node has at the same path."
            )
        time.sleep(0.1)


def _has_mark(directory: Path, mark: str) -> bool:
    try:
        return (directory / MARK).read_text() == mark
    except OSError:
        return False
