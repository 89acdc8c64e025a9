"""What runs the trials of a run, and what every engine says when a trial fails."""

from __future__ import annotations

import abc
import errno
import time
import traceback
from collections.abc import Callable, Sequence

from normkit.errors import NormkitError
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.progress import EVERY, Progress
from normkit.lab.trial import Notify, RunOptions, run_trial


class TrialError(NormkitError, RuntimeError):
    """A trial that failed, or the process that ran it."""


class Engine(abc.ABC):
    """Runs trials, each with one thread: the number of threads may change the last digit of a convolution."""

    @abc.abstractmethod
    def run(self, trials: Sequence[Trial], options: RunOptions, jobs: int | None, progress: Progress) -> None:
        """Run trials to their ends, at most `jobs` of them side by side; None: as many as there is room for.

        Raises what the first trial to fail raised, or a TrialError with its name. When this returns or raises, no trial
        is running any more, or none will for longer than it takes a process to end.
        """


def run_named(trial: Trial, options: RunOptions, notify: Notify) -> None:
    """Run a trial of the experiment that it names."""
    run_trial(experiment_named(trial.experiment), trial, options, notify)


def failure_of(work: Callable[[], None]) -> str | None:
    """Do the work of a trial; return what went wrong, if anything did."""
    try:
        work()
    except NormkitError as error:
        return str(error)
    except OSError as error:
        return disk_trouble(error)
    except Exception:
        return traceback.format_exc()
    return None


def disk_trouble(error: OSError) -> str:
    """Say what to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return f"The disk is full ({error}). Nothing that was measured is lost: make room and resume with --resume."
    return f"{error}. What was measured before is kept: resume with --resume."


class StepReporter:
    """Reports a trial's steps, at most as often as they are shown: a message costs as much as a small step."""

    def __init__(self, report: Notify) -> None:
        self._report, self._reported = report, 0.0

    def __call__(self, step: int, steps: int, accuracy: float | None) -> None:
        """A step was taken."""
        now = time.monotonic()
        if now - self._reported >= EVERY or step == steps:
            self._reported = now
            self._report(step, steps, accuracy)
