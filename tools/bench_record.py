"""Write what `normkit bench --out` found as records for docs/records: the figures, and a table for each family.

python tools/bench_record.py results.json docs/records
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from normkit.bench import EAGER, Result, SummaryRow, summarize

Table = dict[str, Any]


def records_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Records by name, in the form that the directive `record` shows."""
    results = [Result.from_json(case) for case in document["cases"]]
    families = list(dict.fromkeys(result.family for result in results))
    tables = {family: _family([r for r in results if r.family == family]) for family in families}
    tables["figures"] = _figures(summarize(results))
    suffix = "" if (isa := document["settings"]["isa"]) is None else f"-{isa}"
    run, reported = _run(document), f"Measured on {document['date'][:10]}."
    return {
        f"speed-{name}{suffix}": {"run": run, "reported": reported, "tables": [table]}
        for name, table in tables.items()
        if table["rows"]
    }


def _run(document: dict[str, Any]) -> str:
    machine, settings = document["environment"], document["settings"]
    kernels = machine["kernels"].get("instruction set", machine["kernels"]["backend"])
    rounds = f"{settings['rounds']} interleaved rounds, whole networks {settings['model_rounds']}"
    where = f"{machine['cores']} cores of {machine['cpu']} ({kernels}), torch {machine['torch']}"
    return f"`normkit bench` on {where}; {rounds}."


def _figures(rows: Iterable[SummaryRow]) -> Table:
    """A row for each figure: what is wanted, and for each number of threads the mean and the worst."""

    def wanted(row: SummaryRow) -> str:
        if row.wanted is None:
            return ""
        bound = "at least" if row.better == "more" else "at most"
        return f"{'each ' if row.wanted_of == 'worst' else ''}{bound} {row.wanted:g}"

    def cell(row: SummaryRow) -> str:
        return f"{row.value:.2f} (worst {row.worst:.2f}){' **missed**' if row.reached is False else ''}"

    rows = list(rows)
    return _table(
        ["figure", "wanted"], rows, lambda row: (row.figure, wanted(row)), lambda row: (row.threads, ""), cell
    )


def _family(results: list[Result]) -> Table:
    """A row for each case, or of networks for each and its images; for each number of threads theirs over ours."""

    def label(result: Result) -> tuple[str]:
        if "network" not in result.facts:
            return (result.name,)
        batch, _, height, width = result.facts["shape"]
        return (f"{result.facts['network']}, {height}x{width}, batch {batch}",)

    def column(result: Result, contestant: str) -> tuple[int, str]:
        mode = f"{result.facts['mode']}, " if "network" in result.facts else ""
        return result.threads, mode + ("" if contestant == EAGER else f"{contestant}, ")

    def cell(pair: tuple[Result, str]) -> str:
        spread = pair[0].ratios[pair[1]]
        return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"

    pairs = [(result, contestant) for result in results for contestant in result.ratios]
    return _table(["case"], pairs, lambda pair: label(pair[0]), lambda pair: column(*pair), cell)


def _table(
    heads: list[str],
    items: list[Any],
    label: Callable[[Any], tuple[str, ...]],
    column: Callable[[Any], tuple[int, str]],
    cell: Callable[[Any], str],
) -> Table:
    """Arrange items by label and column; a cell that no item has stays empty."""
    columns = list(dict.fromkeys(column(item) for item in items))
    columns.sort(key=lambda one: one[0])
    rows: dict[tuple[str, ...], dict[tuple[int, str], str]] = {}
    for item in items:
        rows.setdefault(label(item), {})[column(item)] = cell(item)
    return {
        "title": "",
        "columns": heads + [f"{what}{threads} thread{'s' if threads > 1 else ''}" for threads, what in columns],
        "rows": [[*first, *(cells.get(one, "") for one in columns)] for first, cells in rows.items()],
    }


def write_records(document: Path, directory: Path) -> list[Path]:
    """Write every record of a document; return their files."""
    written = []
    for name, record in records_of(json.loads(document.read_text())).items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_records(Path(sys.argv[1]), Path(sys.argv[2])):
        print(path)
