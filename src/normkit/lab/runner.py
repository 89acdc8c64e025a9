"""Run the trials of experiments in a directory that one process owns: what is left of a plan, on any engine."""

from __future__ import annotations

from collections.abc import Sequence

from normkit.lab.engines.engine import Engine
from normkit.lab.engines.local import LocalEngine
from normkit.lab.locks import locked
from normkit.lab.plan import RunPlan, check_plan, read_plan, write_plan
from normkit.lab.progress import Progress
from normkit.lab.trial import RunOptions, is_ended, trial_paths


def run(
    plan: RunPlan,
    options: RunOptions,
    jobs: int | None = None,
    progress: Progress | None = None,
    only: Sequence[str] = (),
    engine: Engine | None = None,
) -> None:
    """Run all trials of a plan, or `only` some experiments', that have not ended.

    If interrupted, what was done is kept and can be resumed, on the same engine or another; None is that of this
    machine.
    """
    progress = progress or Progress(quiet=True)
    directory, resume = options.directory, options.resume
    if resume:
        read_plan(directory)  # before a directory is made where there was none
    with locked(directory):
        (check_plan if resume else write_plan)(plan, directory)
        trials = plan.trials(only)
        left = [trial for trial in trials if not (resume and is_ended(trial_paths(trial, directory)[0]))]
        with progress.of(trials, left):
            (engine or LocalEngine()).run(left, options, jobs, progress)
