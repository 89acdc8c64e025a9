"""`normkit lab`: the experiments, run, gone on with and reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from normkit.cli.options import Format
from normkit.errors import ArgumentError
from normkit.lab.experiment import SCALES
from normkit.lab.experiments import NAMES, SETS, experiment_named, names_in, nearest
from normkit.lab.findings import Findings
from normkit.lab.progress import Progress
from normkit.lab.record import Run, read_run
from normkit.lab.runner import Plan, disk_trouble, read_plan, run
from normkit.optional import required

lab_app = typer.Typer(help="Experiments: claims of papers, put to the test.", no_args_is_help=True)

REPORT = "report.html"


@lab_app.command("list")
def list_experiments(format: Format = "text") -> None:
    """List the experiments, each with its claim."""
    found = [experiment_named(name) for name in NAMES]
    if format == "json":
        print(json.dumps([{"name": e.name, "claim": e.claim, "source": e.source} for e in found], indent=2))
        return
    for experiment in found:
        print(f"{experiment.name}\n    {experiment.claim}\n    {experiment.source}")
    for name, names in SETS.items():
        print(f"{name}\n    A set: {' and '.join(names)}, on one page.")


@lab_app.command("run")
def run_experiment(
    name: Annotated[str, typer.Argument(help="An experiment or a set of them: see `normkit lab list`.")],
    scale: Annotated[str, typer.Option(help="quick: for a test; desk: for a laptop; full: the paper's own.")] = "desk",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; each is a trial of every arm.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set (`normkit data list`), or a folder of images.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory.", show_default="runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials side by side.", show_default="one per core")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write logs for TensorBoard, too.")] = False,
    format: Format = "text",
) -> None:
    """Run an experiment, write its report, and print what it found."""
    directory = out or Path("runs") / name
    plan = _plan(name, scale, data, seeds, directory, resume)
    _run(plan, directory, resume, jobs, tensorboard)
    _conclude(directory, format)


@lab_app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")], format: Format = "text"
) -> None:
    """Write the report of a run again, from its records."""
    _conclude(directory, format)


def _plan(name: str, scale: str, data: str | None, seeds: int | None, directory: Path, resume: bool) -> Plan:
    names = names_in(name)
    if scale not in SCALES:
        raise ArgumentError(f"--scale must be one of {', '.join(SCALES)}; got {scale!r}.{nearest(scale, list(SCALES))}")
    if resume:  # what is asked for and differs from the run is refused by it
        found = read_plan(directory)
        return found._replace(name=name, data=data or found.data, seeds=seeds or found.seeds)
    from normkit.lab import data as sets  # only a run needs them

    for experiment in map(experiment_named, names):  # what is wrong with the data is said before anything is written
        (sets.load_any if experiment.takes_large_images else sets.load)(data or experiment.data)
    return Plan(name, scale, data, seeds)


def _run(plan: Plan, directory: Path, resume: bool, jobs: int | None, tensorboard: bool) -> None:
    if tensorboard:  # in the same way: before anything is written
        required("torch.utils.tensorboard", "--tensorboard", "tensorboard", extra="tensorboard")
    try:
        run(plan, directory, resume, jobs, Progress(), tensorboard)
    except KeyboardInterrupt:
        again = f"normkit lab run {plan.name} --out {directory} --resume"
        _say(f"Stopped. What was done is in {directory}; to go on: {again}")
        raise typer.Exit(130) from None
    except OSError as error:
        _say(f"normkit: {disk_trouble(error)}")
        raise typer.Exit(2) from None


def _conclude(directory: Path, format: str) -> None:
    """Write the report and the numbers; print the findings."""
    from normkit.lab.report import Section, terminal_table, write_numbers, write_report  # only now: they take time

    sections = []
    for records in read_run(directory).by_experiment():
        name = str(records.header["experiment"])
        sections.append(Section(records, experiment_named(name).findings(records), name, _command(records, directory)))
    path = write_report(sections, directory / REPORT)
    write_numbers(sections, directory)
    if format == "json":
        summaries = [_summary(section.title, section.findings) for section in sections]
        print(json.dumps([*summaries, {"report": str(path)}], indent=2))
        return
    for section in sections:
        Console().print(terminal_table(section.findings))
        print()
    print(f"The report: {path}")


def _command(records: Run, directory: Path) -> str:
    header = records.header
    seeds = len({trial.seed for trial in records.trials})
    return (
        f"normkit lab run {header['experiment']} --scale {header['scale']} --data {header['data']} --seeds {seeds} "
        f"--out {directory.name}"
    )


def _summary(name: str, findings: Findings) -> dict[str, Any]:
    return {
        "experiment": name,
        "claim": findings.claim,
        "outcome": findings.outcome,
        "reasons": list(findings.reasons),
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]} for t in findings.tables
        ],
    }


def _say(message: str) -> None:
    print(message, file=sys.stderr)
