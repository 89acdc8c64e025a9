"""`normkit bench`: this machine, ours and torch's side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from normkit.bench import FULL, QUICK, Plan, Result, choose, is_crowded, record, run
from normkit.cli.bench_tables import print_tables
from normkit.cli.options import Format
from normkit.environment import count_cores
from normkit.errors import ArgumentError, NormkitError


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and rounds, no torch.compile: about a minute.")
    ] = False,
    format: Format = "text",
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads, such as 1,2.", show_default="1, and all cores")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A group, or a pattern of group/case; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results there as JSON, too.")] = None,
    allocator: Annotated[
        Literal["keep", "default"],
        typer.Option(help="Keep freed memory mapped, for every contestant, or leave malloc as it is."),
    ] = "keep",
) -> None:
    """Measure our layers, torch eager, torch.compile and the memory limit, interleaved, on this machine."""
    counts = _parse_threads(threads) if threads is not None else sorted({1, count_cores()})
    plan = Plan(choose(only or [], quick=quick), counts, QUICK if quick else FULL, allocator)
    if out is not None:
        _check_writable(out)
    results, complete = _measure(plan)
    document = record(plan, results, complete=complete)
    if format == "json":
        print(json.dumps(document, indent=2))
    else:
        print_tables(document, results)
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n")
    _warn_of_neighbours(results)
    if not complete:
        raise typer.Exit(2)
    if any(result.errors for result in results):
        raise typer.Exit(1)


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


def _measure(plan: Plan) -> tuple[list[Result], bool]:
    """Return what was measured until the end, Ctrl-C or a failure, and whether it was the end."""
    results: list[Result] = []
    try:
        for result in _with_progress(plan):
            results.append(result)
            for contestant, error in result.errors.items():
                _say(f"{result.group}/{result.name}: {contestant} could not run: {error}")
    except KeyboardInterrupt:
        _say(f"Stopped after {len(results)} of {len(plan)} cases.")
        return results, False
    except NormkitError as error:
        _say(str(error))
        return results, False
    return results, True


def _warn_of_neighbours(results: list[Result]) -> None:
    crowded = [result for result in results if is_crowded(result.threads, result.neighbours)]
    if crowded:
        _say(
            f"Do not trust {len(crowded)} of {len(results)} cases: other processes kept up to "
            f"{max(result.neighbours or 0.0 for result in crowded):.1f} cores busy, and threads had to wait for them. "
            "Measure again when the machine is free."
        )


def _with_progress(plan: Plan) -> Iterator[Result]:
    console = Console(stderr=True)
    if not console.is_terminal:
        for done, result in enumerate(run(plan), start=1):
            _say(f"{done} of {len(plan)}: {result.group}/{result.name}, threads: {result.threads}")
            yield result
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(plan))
        for result in run(plan):
            progress.update(task, advance=1, description=f"{result.group}/{result.name}, threads: {result.threads}")
            yield result


def _say(message: str) -> None:
    print(message, file=sys.stderr)
