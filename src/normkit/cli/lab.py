"""`normkit lab`: run experiments, resume them, report what they found, and compare two runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from normkit.cli.options import Format

if TYPE_CHECKING:
    from normkit.lab import Conclusion

lab_app = typer.Typer(help="Experiments: claims of papers, put to the test.", no_args_is_help=True)


@lab_app.command("list")
def list_experiments(format: Format = "text") -> None:
    """List the experiments, each with its claim."""
    from normkit.lab.experiments import ALL, NAMES, SETS, experiment_named

    found = [experiment_named(name) for name in NAMES]
    if format == "json":
        print(json.dumps([{"name": e.name, "claim": e.claim, "source": e.source} for e in found], indent=2))
        return
    for experiment in found:
        print(f"{experiment.name}\n    {experiment.claim}\n    {experiment.source}")
    for name, names in SETS.items():
        print(f"{name}\n    A set: {'all of the above' if name == ALL else ' and '.join(names)}, on one page.")


@lab_app.command("run")
def run(
    name: Annotated[str, typer.Argument(help="An experiment or a set of them: see `normkit lab list`.")],
    scale: Annotated[str, typer.Option(help="quick: for a test; desk: for a laptop; full: the paper's own.")] = "desk",
    only: Annotated[list[str] | None, typer.Option(help="Of a set: an experiment, or a pattern; repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; each is a trial of every arm.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A data set (`normkit data list`), a folder of images, or a text.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory.", show_default="runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials side by side.", show_default="one per core")] = None,
    engine: Annotated[str, typer.Option(help="local: processes of this machine; ray: a Ray cluster.")] = "local",
    cpus_per_trial: Annotated[
        float | None, typer.Option(help="CPUs of the cluster for each trial.", show_default="1")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write logs for TensorBoard, too.")] = False,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="With torchrun: parts of a rank's batch.", show_default="1")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="With torchrun: float32 or bfloat16.", show_default="float32")
    ] = None,
    format: Format = "text",
) -> None:
    """Run an experiment, write its report, and print what it found."""
    from normkit.lab import run_experiment  # on use: it takes a moment
    from normkit.lab.engines import disk_trouble
    from normkit.lab.progress import Progress
    from normkit.lab.ranks import is_first_rank

    out = out or Path("runs") / name
    try:
        found = run_experiment(
            name,
            out,
            scale=scale,
            only=only or (),
            seeds=seeds,
            data=data,
            resume=resume,
            jobs=jobs,
            tensorboard=tensorboard,
            engine=engine,
            cpus_per_trial=cpus_per_trial,
            micro_batches=micro_batches,
            precision=precision,
            progress=Progress(),
        )
    except KeyboardInterrupt:
        resume_command = _resume_command(name, only or (), out, engine)
        print(f"Stopped. What was done is in {out}; to resume: {resume_command}", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        print(f"normkit: {disk_trouble(error)}", file=sys.stderr)
        raise typer.Exit(2) from None
    if is_first_rank():
        _show(found, format)


@lab_app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(help="A run's directory, finished or not, or what nk.attach wrote.")],
    format: Format = "text",
) -> None:
    """Write the report of a run again, from its records: of an experiment, or of probes in a training of your own."""
    from normkit.lab import write_report_of
    from normkit.lab.record import RECORDS

    is_experiment = (directory / RECORDS).is_dir()
    if not is_experiment and _is_recorded(directory):
        _show_page(directory, format)
    else:
        _show(write_report_of(directory), format)


@lab_app.command("compare")
def compare(
    one: Annotated[Path, typer.Argument(help="A run's directory, finished or not.")],
    other: Annotated[Path, typer.Argument(help="Another's.")],
    format: Format = "text",
) -> None:
    """Put two runs side by side; exit with 1 if a verdict differs."""
    from normkit.cli.lab_tables import comparison_tables, comparison_text
    from normkit.lab import compare_runs

    found = compare_runs(one, other)
    if format == "json":
        print(json.dumps(found.summary(), indent=2))
    else:
        Console().print(*comparison_tables(found), sep="\n\n")
        print(comparison_text(found))
    raise typer.Exit(0 if found.agrees else 1)


def _is_recorded(path: Path) -> bool:
    """Whether these are records of probes, and not of an experiment's trials."""
    from normkit.instruments.plots import recorded_files

    return bool(recorded_files(path))


def _show_page(path: Path, format: str) -> None:
    from normkit.instruments.plots import report_of

    page = report_of(path)
    print(json.dumps([{"report": str(page)}], indent=2) if format == "json" else f"The report: {page}")


def _resume_command(name: str, only: Sequence[str], out: Path, engine: str) -> str:
    chosen = "".join(f" --only {shlex.quote(pattern)}" for pattern in only)
    return f"normkit lab run {name}{chosen}{'' if engine == 'local' else f' --engine {engine}'} --out {out} --resume"


def _show(found: Conclusion, format: str) -> None:
    if format == "json":
        print(json.dumps([*found.summary(), {"report": str(found.report)}], indent=2))
        return
    from normkit.cli.lab_tables import verdict_table
    from normkit.lab.report import terminal_table

    for section in found.sections:
        Console().print(terminal_table(section.findings))
        print()
    if len(found.sections) > 1:
        Console().print(verdict_table(found.sections))
    print(f"The report: {found.report}")
