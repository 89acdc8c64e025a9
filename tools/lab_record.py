"""Write what the runs in a directory found as records for docs/lab/records, from the numbers of their report.

python tools/lab_record.py runs/paper docs/lab/records

A record's picture is the first figure of the report.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from normkit.figures.figure import Curve, Figure
from normkit.figures.png import write_stack
from normkit.lab.certainty import Certainty
from normkit.lab.report.numbers import DOCUMENT

WIDTH = 720  # of pictures, in pixels


def record_of(section: dict[str, Any]) -> dict[str, Any]:
    """A section of `numbers.json` in the form that the directive `record` shows."""
    findings, header = section["findings"], section["trials"][0]["header"]
    machine = header["environment"]
    return {
        "claim": findings["claim"],
        "outcome": findings["outcome"],
        "certainty": Certainty(**section["certainty"]).text(findings["outcome"]) if section["certainty"] else "",
        "reasons": findings["reasons"],
        "run": f"`{section['command']}`, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}.",
        "reported": f"Commit {str(header['commit'])[:7]}, {header['started'][:10]}.",
        "tables": [{key: table[key] for key in ("title", "columns", "rows")} for table in findings["tables"]],
        "notes": findings["notes"],
    }


def write_records(run: Path, directory: Path) -> list[Path]:
    """Write a record, and a picture, for each experiment of a run whose report was written; return the records."""
    sections = json.loads((run / DOCUMENT).read_text())["sections"]
    return [_write(directory / f"{_experiment(section)}.json", section) for section in sections]


def _experiment(section: dict[str, Any]) -> str:
    return str(section["trials"][0]["header"]["experiment"])


def _write(path: Path, section: dict[str, Any]) -> Path:
    record, figures = record_of(section), section["findings"]["figures"]
    if figures:
        picture = write_stack([_figure(figures[0])], path.with_suffix(".png"), WIDTH)
        record["picture"] = {"file": picture.name, "title": figures[0]["title"]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def _figure(drawn: dict[str, Any]) -> Figure:
    """A figure as it was before JSON, which has no name for what is not finite."""

    def numbers(values: list[float | None] | None) -> list[float] | None:
        return None if values is None else [math.nan if value is None else value for value in values]

    lists = ("x", "y", "low", "high")
    curves = [Curve(**{**curve, **{key: numbers(curve[key]) for key in lists}}) for curve in drawn["curves"]]
    return Figure(**{**drawn, "curves": curves})


if __name__ == "__main__":
    for written in write_records(Path(sys.argv[1]), Path(sys.argv[2])):
        print(written)
