"""The numbers of a report as files: one JSON document with everything, a CSV for each table and figure."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

from normkit.figures.figure import Curve, Figure
from normkit.figures.values import plain
from normkit.lab.record import TrialRecord
from normkit.lab.report.provenance import state_of
from normkit.lab.report.section import Section

DOCUMENT = "numbers.json"
FIGURE_COLUMNS = ("curve", "published", "x", "y", "low", "high")
_NAME_LENGTH = 40


def write_numbers(sections: Sequence[Section], directory: Path) -> list[Path]:
    """Write all numbers of a report to a directory; return the files, the document first."""
    directory.mkdir(parents=True, exist_ok=True)
    document = directory / DOCUMENT
    text = json.dumps({"sections": [_section(section) for section in sections]}, indent=1, allow_nan=False)
    document.write_text(text + "\n", encoding="utf-8")
    return [document, *(path for i, section in enumerate(sections, 1) for path in _write_csvs(i, section, directory))]


def _section(section: Section) -> dict[str, Any]:
    trials = [_trial(trial) for trial in section.run.trials]
    return {
        "title": section.title,
        "command": section.command,
        "findings": plain(asdict(section.findings)),
        "certainty": section.certainty and section.certainty._asdict(),
        "trials": trials,
    }


def _trial(trial: TrialRecord) -> dict[str, Any]:
    return {"header": plain(trial.header), "state": state_of(trial), "end": plain(trial.end)}


def _write_csvs(number: int, section: Section, directory: Path) -> Iterable[Path]:
    stem = f"{number}-{_file_name(section.title)}"
    for i, table in enumerate(section.findings.tables, 1):
        yield _write_csv(directory / f"{stem}-table-{i}-{_file_name(table.title)}.csv", table.columns, table.rows)
    for i, figure in enumerate(section.findings.figures, 1):
        path = directory / f"{stem}-figure-{i}-{_file_name(figure.title)}.csv"
        yield _write_csv(path, FIGURE_COLUMNS, _points(figure))


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def _points(figure: Figure) -> Iterable[Sequence[Any]]:
    for curve in figure.curves:
        yield from _curve_points(curve)


def _curve_points(curve: Curve) -> Iterable[Sequence[Any]]:
    low: Iterable[float | None] = repeat(None) if curve.low is None else curve.low
    high: Iterable[float | None] = repeat(None) if curve.high is None else curve.high
    published = "yes" if curve.is_published else "no"
    return ((curve.name, published, *point) for point in zip(curve.x, curve.y, low, high, strict=False))


def _file_name(title: str) -> str:
    """A title in letters that every file system takes."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "untitled"
