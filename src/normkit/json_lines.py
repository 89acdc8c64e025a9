"""Files of JSON objects, one per line, written as they come.

A line is on the disk before the next one is made, so a kill at any moment loses at most the line being written. An
incomplete last line is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normkit.errors import NormkitError
from normkit.jsonable import jsonable

Line = dict[str, Any]


class RecordError(NormkitError, ValueError):
    """A file that is not the record or checkpoint it should be."""


class LineWriter:
    """Appends lines to a file, after its first `size` bytes; the rest is cut off."""

    def __init__(self, path: Path, size: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115, closed by `close`
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, line: Mapping[str, Any]) -> int:
        """Write a line and return the file's new length in bytes. NaN and infinity become "nan", "inf" and "-inf"."""
        self._file.write(json.dumps(jsonable(line), allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[Line]:
    """Read the complete lines of a file."""
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):  # a line ends in a newline
        try:
            line = json.loads(text)
        except ValueError as error:
            raise RecordError(f"{path}, line {number}, is not JSON: {error}. It was not written by normkit.") from None
        if not isinstance(line, dict):
            raise RecordError(f"{path}, line {number}, must be a JSON object; got {type(line).__name__}.")
        yield line
