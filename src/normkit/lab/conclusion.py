"""Run experiments and report what they found, in one call: what `normkit lab run` and `normkit lab report` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab import data as sets
from normkit.lab.certainty import certainty_of
from normkit.lab.engines import engine_named
from normkit.lab.experiment import SCALES
from normkit.lab.experiments import ALL, experiment_named, names_in
from normkit.lab.plan import PLAN, RunPlan, read_plan
from normkit.lab.progress import Progress
from normkit.lab.ranks import StepOptions, is_first_rank, is_launched, is_restarted, rank_count, run_over_ranks
from normkit.lab.record import Run, read_run
from normkit.lab.report import Section, write_numbers, write_report, write_story
from normkit.lab.runner import run
from normkit.lab.trial import RunOptions
from normkit.optional import required

REPORT = "report.html"


class Conclusion(NamedTuple):
    """What a run found: a section for each experiment, and the page that shows them."""

    sections: list[Section]
    report: Path

    def summary(self) -> list[dict[str, Any]]:
        """Claims, outcomes, how sure they are, reasons and tables in JSON's types."""
        return [summary_of(section) for section in self.sections]


def run_experiment(
    name: str,
    out: str | Path | None = None,
    *,
    scale: str = "desk",
    only: Sequence[str] = (),
    seeds: int | None = None,
    data: str | None = None,
    resume: bool = False,
    jobs: int | None = None,
    tensorboard: bool = False,
    engine: str = "local",
    cpus_per_trial: float | None = None,
    micro_batches: int | None = None,
    precision: str | None = None,
    progress: Progress | None = None,
) -> Conclusion:
    """Run an experiment, or a set of them, and write its report.

    The files of the run are in `out`, by default `runs/NAME`. What is None is the experiment's own choice; `jobs`, the
    number of trials that run side by side, is then the number of cores. Of a set, `only` runs the experiments that are
    named or match a pattern. A run that was interrupted, or of which `only` a part was run, is completed with
    `resume=True`, and ends with the numbers that it would have had. Several jobs start processes that import the
    caller's main module: a script needs `if __name__ == "__main__":`, or jobs=1. With `engine="ray"` the trials run
    on a Ray cluster, each with `cpus_per_trial` of its CPUs (1), and have the same numbers.

    In processes that torchrun started, each trial is trained over all of them: a rank's part of a batch is taken in
    `micro_batches`, by default 1, and `precision` is "float32" or "bfloat16".
    """
    directory = Path("runs") / name if out is None else Path(out)
    names = names_in(name, only)
    if scale not in SCALES:
        raise ArgumentError(f"--scale must be one of {', '.join(SCALES)}; got {scale!r}.{did_you_mean(scale, SCALES)}")
    if tensorboard:  # before anything is written
        required("torch.utils.tensorboard", "--tensorboard", "tensorboard", extra="tensorboard")
    runs_trials = engine_named(engine, cpus_per_trial)
    _check_for_ranks(engine, jobs, micro_batches, precision)
    resume = resume or is_restarted(directory)
    asked = RunPlan(name, scale, data, seeds, rank_count(), micro_batches or 1, precision or "float32")
    plan = _resumed_plan(asked, directory) if resume else _new_plan(asked, names)
    if progress is not None and is_first_rank() and (others := _with_own_data(plan, names)):
        progress.say(f"Not on {plan.data}, which is of another kind: {', '.join(others)}.")
    options = RunOptions(directory, resume, tensorboard)
    if not is_launched():
        run(plan, options, jobs, progress, only, runs_trials)
    else:
        run_over_ranks(plan, options, progress, only)
    return write_report_of(directory) if is_first_rank() else Conclusion(sections_of(directory), directory / REPORT)


def _check_for_ranks(engine: str, jobs: int | None, micro_batches: int | None, precision: str | None) -> None:
    if not is_launched() and (micro_batches is not None or precision is not None):
        raise ArgumentError(
            "--micro-batches and --precision are for training over ranks: "
            "torchrun --nproc-per-node N -m normkit lab run …, where N may be 1."
        )
    if is_launched() and jobs is not None:
        raise ArgumentError("--jobs is not for ranks, which train one trial after another together. Leave it out.")
    if is_launched() and engine != "local":
        raise ArgumentError(f"--engine {engine} is not for ranks, which are there already. Leave it out, or torchrun.")
    StepOptions(1 if micro_batches is None else micro_batches, precision or "float32").check()


def write_report_of(directory: str | Path) -> Conclusion:
    """Write the report of a run, finished or not, and its numbers, from its records: of all experiments, the story."""
    directory = Path(directory)
    sections, plan = sections_of(directory), _plan_in(directory)
    if plan is not None and plan.name == ALL:
        command = f"normkit lab run {ALL} --out {directory.name} --resume"
        report = write_story(sections, [*map(experiment_named, names_in(ALL))], command, directory / REPORT)
    else:
        report = write_report(sections, directory / REPORT)
    write_numbers(sections, directory)
    return Conclusion(sections, report)


def sections_of(directory: Path) -> list[Section]:
    """What each experiment of a run found, from the records, in the order in which the run has them."""
    runs = {str(records.header["experiment"]): records for records in read_run(directory).by_experiment()}
    plan = _plan_in(directory)
    names = [] if plan is None else [name for name in names_in(plan.name) if name in runs]
    return [_section(name, runs[name], plan, directory) for name in dict.fromkeys([*names, *runs])]


def _plan_in(directory: Path) -> RunPlan | None:
    """The plan of a run; None of records that were put somewhere without it."""
    return read_plan(directory) if (directory / PLAN).exists() else None


def _resumed_plan(asked: RunPlan, directory: Path) -> RunPlan:
    """The plan of the run itself, with what was asked for: if that differs, the run refuses it."""
    found = read_plan(directory)
    return asked._replace(scale=found.scale, data=asked.data or found.data, seeds=asked.seeds or found.seeds)


def _new_plan(asked: RunPlan, names: Sequence[str]) -> RunPlan:
    """What was asked for, if the data is there: an error in it is reported before anything is written."""
    if len(_with_own_data(asked, names)) == len(names):
        raise ArgumentError(
            f"--data needs what {' or '.join(names)} takes; got {asked.data!r}, which is "
            f"{'a text' if sets.is_text(asked.data or '') else 'not a text'}. `normkit data list` lists the sets."
        )
    for experiment in map(experiment_named, names):
        sets.LOADERS[experiment.takes](asked.data_of(experiment))
    return asked


def _with_own_data(plan: RunPlan, names: Sequence[str]) -> list[str]:
    """Those that do not run on the data that was chosen, with what they run on."""
    found = {name: plan.data_of(experiment_named(name)) for name in names}
    return [f"{name} (on {own})" for name, own in found.items() if plan.data is not None and own != plan.data]


def _section(name: str, records: Run, plan: RunPlan | None, directory: Path) -> Section:
    header, seeds = records.header, len(records.by_seed())
    program = f"torchrun --nproc-per-node {header['ranks']} -m normkit" if "ranks" in header else "normkit"
    own = RunPlan(name, header["scale"], header["data"], seeds)
    return Section(
        records,
        experiment_named(name).findings(records),
        name,
        f"{program} lab run {name} --scale {own.scale} --data {own.data} --seeds {seeds} --out {directory.name}",
        certainty_of(records, plan or own),
    )


def summary_of(section: Section) -> dict[str, Any]:
    """What a section says, in JSON's types."""
    findings = section.findings
    return {
        "experiment": section.title,
        "claim": findings.claim,
        "outcome": findings.outcome,
        "how_sure": section.how_sure,
        "reasons": list(findings.reasons),
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]} for t in findings.tables
        ],
    }
