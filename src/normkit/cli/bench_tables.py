"""What `normkit bench` found, as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from normkit.bench import EAGER, OURS, Result, Spread, SummaryRow, TrafficRow, summarize

_WIDTH = 180  # columns, where the output is not a terminal


def print_tables(document: dict[str, Any], results: Sequence[Result]) -> None:
    """Print where it ran, the cases by family and number of threads, and the figures."""
    console = _console()
    for line in _header(document):
        console.print(line, markup=False)
    for (threads, family), found in groupby(results, key=lambda result: (result.threads, result.family)):
        console.print(_case_table(f"{family}, threads: {threads}", list(found)))
    if rows := summarize(results):
        console.print(_summary_table(rows))


def print_traffic(rows: Sequence[TrafficRow]) -> None:
    """Print the passes and bytes of every call, torch's beside ours."""
    table = Table(title="passes over large tensors, and bytes over the input's", title_justify="left")
    for heading in ("call", "mode", "type"):
        table.add_column(heading)
    for heading in ("torch, passes", "ours", "torch, bytes", "ours", "no more than torch"):
        table.add_column(heading, justify="right")
    for row in rows:
        passes = str(row.torch.passes), str(row.ours.passes)
        sizes = (f"{traffic.bytes / row.input_bytes:.1f}" for traffic in (row.torch, row.ours))
        table.add_row(row.call, row.mode, row.dtype, *passes, *sizes, "yes" if row.is_no_more else "no")
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def _header(document: dict[str, Any]) -> Iterator[str]:
    env, settings = document["environment"], document["settings"]
    kernels = ", ".join(f"{name}: {value}" for name, value in env["kernels"].items())
    yield f"normkit {env['normkit']} ({kernels}), torch {env['torch']}, Python {env['python']}"
    yield f"{env['cpu']}, cores: {env['cores']}, {env['platform']}, {document['date']}"
    allocator = " ".join(f"{name}={value}" for name, value in env["allocator"].items())
    yield f"allocator {settings['allocator']['name']!r}: {allocator or 'as the system has it'}"
    yield (
        f"Medians (quartiles) of {settings['rounds']} interleaved rounds, whole models {settings['model_rounds']}. "
        "x: how many times our time theirs is. limit: what copying memory takes."
    )


def _case_table(title: str, results: list[Result]) -> Table:
    """Only what some case of the family has becomes a column."""
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    columns = [[result.name for result in results]]
    for heading, cells in _columns(results):
        if any(cells):
            table.add_column(heading, justify="right")
            columns.append(cells)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _columns(results: list[Result]) -> Iterator[tuple[str, list[str]]]:
    """Times of ours and torch eager, the ratios of all to ours, the multiples of the limit, and bytes."""
    for name in (OURS, EAGER):
        yield f"{name}, ms", [_spread(r.seconds.get(name), 1e3) for r in results]
    for name in _contestants(r.ratios for r in results):
        yield f"{name}, x", [_spread(r.ratios.get(name)) for r in results]
    for name in (OURS, EAGER):
        yield f"{name} / limit", [f"{r.multiples[name].median:.2f}" if name in r.multiples else "" for r in results]
    for name in _contestants(r.bytes for r in results):
        yield f"{name}, MB", [f"{r.bytes[name] / 1e6:.1f}" if name in r.bytes else "" for r in results]


def _contestants(tables: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _spread(spread: Spread | None, scale: float = 1.0) -> str:
    if spread is None:
        return ""
    low, median, high = (f"{value * scale:.3g}" for value in (spread.low, spread.median, spread.high))
    return f"{median} ({low} to {high})"


def _summary_table(rows: list[SummaryRow]) -> Table:
    table = Table("figure", title="geometric means, and the worst case of each", title_justify="left")
    for heading in ("threads", "cases", "theirs", "ours", "worst", "wanted", "reached"):
        table.add_column(heading, justify="right")
    table.add_column("worst case")
    for row in rows:
        numbers = (f"{row.eager:.2f}", f"{row.value:.2f}", f"{row.worst:.2f}", _wanted(row))
        reached = {True: "yes", False: "no", None: ""}[row.reached]
        table.add_row(row.figure, str(row.threads), str(row.cases), *numbers, reached, row.worst_case)
    return table


def _wanted(row: SummaryRow) -> str:
    """From where on it is good enough, or which way is better."""
    if row.wanted is None:
        return row.better
    each, sign = "each " if row.wanted_of == "worst" else "", {"more": ">=", "less": "<="}[row.better]
    return f"{each}{sign} {row.wanted:.2f}"
