"""Run the trials of a plan one after another, each over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from normkit.atomic import replacing
from normkit.errors import DistributedError
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.locks import locked
from normkit.lab.plan import RunPlan, check_plan, write_plan
from normkit.lab.progress import Progress
from normkit.lab.ranks.carrier import AllRanks
from normkit.lab.ranks.group import Ranks, is_first_rank, is_restart, joined, launch_name
from normkit.lab.ranks.options import StepOptions
from normkit.lab.trial import RunOptions, is_ended, run_trial, trial_paths

LAUNCH = ".launch"  # in the directory of a run: which launch began it, or resumed it last


def is_restarted(directory: Path) -> bool:
    """Whether torchrun has restarted its processes, and those before had begun, or resumed, the run in a directory."""
    path = directory / LAUNCH
    return is_restart() and path.exists() and path.read_text() == launch_name()


def run_over_ranks(plan: RunPlan, options: RunOptions, progress: Progress | None, only: Sequence[str] = ()) -> None:
    """As `runner.run`, with every rank of the group that torchrun started."""
    steps = StepOptions(plan.micro_batches, plan.precision)
    progress = progress if progress is not None and is_first_rank() else Progress(quiet=True)
    with joined() as ranks, locked(options.directory) if ranks.rank == 0 else nullcontext():
        resume, launch = ranks.from_first(lambda: _begin(plan, options))
        ranks.together(lambda: _check_shared(options.directory, launch))
        options = options._replace(resume=resume)
        trials = plan.trials(only)
        ended = ranks.from_first(lambda: [resume and _is_ended(trial, options.directory) for trial in trials])
        left = [trial for trial, is_over in zip(trials, ended, strict=True) if not is_over]
        with progress.of(trials, left):
            for trial in left:
                _run_one(trial, options, ranks, steps, progress)


def _run_one(trial: Trial, options: RunOptions, ranks: Ranks, steps: StepOptions, progress: Progress) -> None:
    def notify(step: int, of: int, accuracy: float | None) -> None:
        progress.step(trial, step, of, accuracy)

    run_trial(experiment_named(trial.experiment), trial, options, notify, AllRanks(ranks, steps))
    progress.end(trial)


def _begin(plan: RunPlan, options: RunOptions) -> tuple[bool, str]:
    """Begin a run, or resume it, on the first rank; return whether it is resumed, and by which launch."""
    resume = options.resume or is_restarted(options.directory)
    (check_plan if resume else write_plan)(plan, options.directory)
    with replacing(options.directory / LAUNCH) as part:
        part.write_text(launch_name())
    return resume, launch_name()


def _check_shared(directory: Path, launch: str) -> None:
    path = directory / LAUNCH
    if not path.exists() or path.read_text() != launch:
        raise DistributedError(f"--out needs a folder that all ranks share; {directory} of the first is not seen here.")


def _is_ended(trial: Trial, directory: Path) -> bool:
    return is_ended(trial_paths(trial, directory)[0])
