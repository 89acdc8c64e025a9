"""`normkit bench`: this machine, ours and torch's side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from normkit.bench import (
    FAMILIES,
    FULL,
    QUICK,
    InstructionSet,
    Plan,
    Progress,
    Result,
    check_installed,
    choose,
    count_traffic,
    is_crowded,
    run,
    using_instruction_set,
)
from normkit.cli.bench_tables import print_tables, print_traffic
from normkit.cli.options import Format
from normkit.environment import count_cores
from normkit.errors import ArgumentError, NormkitError


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and rounds, no torch.compile: a few minutes.")
    ] = False,
    format: Format = "text",
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads, such as 1,2.", show_default="1, and all cores")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(FAMILIES)}; repeatable.", show_default="all but the last two"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A family, or a pattern of family/case; repeatable.")] = None,
    options: Annotated[
        bool, typer.Option("--options", help="BatchNorm with every pair of its options: the family of that name.")
    ] = False,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Count passes and bytes of the torch backend's calls; time nothing.")
    ] = False,
    isa: Annotated[
        InstructionSet | None, typer.Option(help="The instruction set of our loops.", show_default="the best")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results there as JSON, too, each as it comes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --out has, and measure the rest.")] = False,
    allocator: Annotated[
        Literal["keep", "default"],
        typer.Option(help="Keep freed memory mapped, for every contestant, or leave malloc as it is."),
    ] = "keep",
) -> None:
    """Measure our layers, torch eager, torch.compile and the memory limit, interleaved, on this machine."""
    counts = _parse_threads(threads) if threads is not None else sorted({1, count_cores()})
    families = [*(family or []), *(["options"] if options else [])]
    cases = choose(only or [], families=families, quick=quick)
    check_installed(cases)
    if out is not None:
        _check_writable(out)
    with using_instruction_set(isa):
        if traffic:
            _count_traffic(format, out)
            return
        progress = Progress(Plan(cases, counts, QUICK if quick else FULL, allocator, isa), out)
        if resume:
            progress.resume()
        complete = _measure(progress)
        _report(progress, format, complete=complete)
    if not complete:
        raise typer.Exit(2)
    if any(result.errors for result in progress.results):
        raise typer.Exit(1)


def _report(progress: Progress, format: str, *, complete: bool) -> None:
    document, results = progress.document(complete=complete), progress.ordered()
    if format == "json":
        print(json.dumps(document, indent=2))
    else:
        print_tables(document, results)
    progress.write(complete=complete)
    _warn_of_neighbours(results)


def _count_traffic(format: str, out: Path | None) -> None:
    rows = count_traffic()
    document = json.dumps([row.as_json() for row in rows], indent=2)
    if format == "json":
        print(document)
    else:
        print_traffic(rows)
    if out is not None:
        out.write_text(document + "\n")


def _parse_threads(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ArgumentError(f"--threads needs whole numbers from 1 on; got {text!r}. Write them as --threads 1,2.")
    return list(dict.fromkeys(counts))


def _check_writable(out: Path) -> None:
    """Find out before the measuring, not after it."""
    try:
        out.open("a").close()
    except OSError as error:
        raise ArgumentError(f"--out needs a file that can be written; got {str(out)!r}: {error}.") from error


def _measure(progress: Progress) -> bool:
    """Measure until the end, Ctrl-C or a failure; return whether it was the end."""
    total = len(progress.plan)
    if done := len(progress):
        _say(f"{done} of {total} cases were measured before.")
    try:
        for result in _with_progress(progress):
            progress.add(result)
            for contestant, error in result.errors.items():
                _say(f"{result.family}/{result.name}: {contestant} could not run: {error}")
    except KeyboardInterrupt:
        _say(f"Stopped after {len(progress)} of {total} cases.")
        return False
    except NormkitError as error:
        _say(str(error))
        return False
    return True


def _warn_of_neighbours(results: list[Result]) -> None:
    crowded = [result for result in results if is_crowded(result.threads, result.neighbours)]
    if crowded:
        _say(
            f"Do not trust {len(crowded)} of {len(results)} cases: other processes kept up to "
            f"{max(result.neighbours or 0.0 for result in crowded):.1f} cores busy, and threads had to wait for them. "
            "Measure again when the machine is free."
        )


def _with_progress(progress: Progress) -> Iterator[Result]:
    before, total = len(progress), len(progress.plan)
    results = run(progress.plan, progress.done)
    console = Console(stderr=True)
    if not console.is_terminal:
        for done, result in enumerate(results, start=before + 1):
            _say(f"{done} of {total}: {result.family}/{result.name}, threads: {result.threads}")
            yield result
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total, completed=before)
        for result in results:
            bar.update(task, advance=1, description=f"{result.family}/{result.name}, threads: {result.threads}")
            yield result


def _say(message: str) -> None:
    print(message, file=sys.stderr)
