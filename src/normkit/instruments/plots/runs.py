"""Recorded runs: the files that `attach(out=...)` wrote, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

from normkit.instruments.outputs import read_records
from normkit.instruments.plots.curves import WHOLE
from normkit.instruments.plots.plot import report
from normkit.json_lines import Line

REPORT = "report.html"
RECORDS = ".jsonl"


def recorded_files(path: Path) -> list[Path]:
    """The files of records that a path is, or that are in the folder that it is."""
    return [path] if path.suffix == RECORDS else sorted(path.glob(f"*{RECORDS}"))


def report_of(path: Path) -> Path:
    """Write the page of a file of records, or of all files in a folder, beside them."""
    files = recorded_files(path)
    folder = files[0].parent
    names = ", ".join(file.stem for file in files)
    return report(_records(files), folder / REPORT, f"What probes recorded: {names}")


def _records(files: list[Path]) -> list[Line]:
    """The records of one file as they are; those of several with the file in the layer's name, to be compared."""
    if len(files) == 1:
        return read_records(files[0])
    return [
        record | {"layer": f"{file.stem}: {record['layer'] or WHOLE}"}
        for file in files
        for record in read_records(file)
    ]
