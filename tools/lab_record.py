"""Write what the runs in a directory found as records for docs/lab/records, from the numbers of their report.

python tools/lab_record.py runs/paper docs/lab/records
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from normkit.lab.report.numbers import DOCUMENT


def record_of(section: dict[str, Any]) -> dict[str, Any]:
    """A section of `numbers.json` in the form that the directive `record` shows."""
    findings, header = section["findings"], section["trials"][0]["header"]
    machine = header["environment"]
    return {
        "outcome": findings["outcome"],
        "run": f"`{section['command']}`, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}.",
        "reported": f"Commit {str(header['commit'])[:7]}, {header['started'][:10]}.",
        "tables": [{key: table[key] for key in ("title", "columns", "rows")} for table in findings["tables"]],
        "notes": [*findings["reasons"], *findings["notes"]],
    }


def write_records(run: Path, directory: Path) -> list[Path]:
    """Write a record for each experiment of a run whose report was written; return their files."""
    sections = json.loads((run / DOCUMENT).read_text())["sections"]
    return [_write(directory / f"{_experiment(section)}.json", record_of(section)) for section in sections]


def _experiment(section: dict[str, Any]) -> str:
    return str(section["trials"][0]["header"]["experiment"])


def _write(path: Path, record: dict[str, Any]) -> Path:
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


if __name__ == "__main__":
    for written in write_records(Path(sys.argv[1]), Path(sys.argv[2])):
        print(written)
