"""Files that a reader finds whole or not at all: written under another name in the same folder, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to. It takes the place of `path` at the end of the block, and is removed on error.

    A symbolic link stays one: the file it leads to is replaced.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        yield part
        put_in_place(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def put_in_place(part: Path, path: Path) -> None:
    """Rename a complete file, with its content and then its new name on the disk before this returns."""
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    with suppress(OSError):  # some systems do not let folders be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
