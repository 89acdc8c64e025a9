"""Run experiments and report what they found, in one call: what `normkit lab run` and `normkit lab report` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab import data as sets
from normkit.lab.experiment import SCALES
from normkit.lab.experiments import experiment_named, names_in
from normkit.lab.plan import RunPlan, read_plan
from normkit.lab.progress import Progress
from normkit.lab.record import Run, read_run
from normkit.lab.report import Section, write_numbers, write_report
from normkit.lab.runner import run
from normkit.lab.trial import RunOptions
from normkit.optional import required

REPORT = "report.html"


class Conclusion(NamedTuple):
    """What a run found: a section for each experiment, and the page that shows them."""

    sections: list[Section]
    report: Path

    def summary(self) -> list[dict[str, Any]]:
        """Claims, outcomes, reasons and tables in JSON's types."""
        return [_summary(section) for section in self.sections]


def run_experiment(
    name: str,
    out: str | Path | None = None,
    *,
    scale: str = "desk",
    seeds: int | None = None,
    data: str | None = None,
    resume: bool = False,
    jobs: int | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> Conclusion:
    """Run an experiment, or a set of them, and write its report.

    The files of the run are in `out`, by default `runs/NAME`. What is None is the experiment's own choice; `jobs`, the
    number of trials that run side by side, is then the number of cores. A run that was interrupted is completed with
    `resume=True`, and ends with the numbers that it would have had. Several jobs start processes that import the
    caller's main module: a script needs `if __name__ == "__main__":`, or jobs=1.
    """
    directory = Path("runs") / name if out is None else Path(out)
    plan = _resumed_plan if resume else _new_plan
    if tensorboard:  # before anything is written
        required("torch.utils.tensorboard", "--tensorboard", "tensorboard", extra="tensorboard")
    run(plan(name, scale, data, seeds, directory), RunOptions(directory, resume, tensorboard), jobs, progress)
    return write_report_of(directory)


def write_report_of(directory: str | Path) -> Conclusion:
    """Write the report of a run, finished or not, and its numbers, from its records."""
    directory = Path(directory)
    sections = [_section(records, directory) for records in read_run(directory).by_experiment()]
    report = write_report(sections, directory / REPORT)
    write_numbers(sections, directory)
    return Conclusion(sections, report)


def _resumed_plan(name: str, scale: str, data: str | None, seeds: int | None, directory: Path) -> RunPlan:
    """The plan of the run itself, with what was asked for: if that differs, the run refuses it."""
    names_in(name)
    _check_scale(scale)
    found = read_plan(directory)
    return found._replace(name=name, data=data or found.data, seeds=seeds or found.seeds)


def _new_plan(name: str, scale: str, data: str | None, seeds: int | None, directory: Path) -> RunPlan:
    names = names_in(name)
    _check_scale(scale)
    for experiment in map(experiment_named, names):  # an error in the data is reported before anything is written
        sets.LOADERS[experiment.takes](data or experiment.data)
    return RunPlan(name, scale, data, seeds)  # type: ignore[arg-type]


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise ArgumentError(f"--scale must be one of {', '.join(SCALES)}; got {scale!r}.{did_you_mean(scale, SCALES)}")


def _section(records: Run, directory: Path) -> Section:
    name = str(records.header["experiment"])
    return Section(records, experiment_named(name).findings(records), name, _command(records, directory))


def _command(records: Run, directory: Path) -> str:
    header = records.header
    seeds = len({trial.seed for trial in records.trials})
    return (
        f"normkit lab run {header['experiment']} --scale {header['scale']} --data {header['data']} --seeds {seeds} "
        f"--out {directory.name}"
    )


def _summary(section: Section) -> dict[str, Any]:
    findings = section.findings
    return {
        "experiment": section.title,
        "claim": findings.claim,
        "outcome": findings.outcome,
        "reasons": list(findings.reasons),
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]} for t in findings.tables
        ],
    }
