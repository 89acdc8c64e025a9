"""Files by their base names, out of a folder or an archive, loose or compressed; nothing is unpacked onto the disk."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from normkit.lab.data.types import DataError

Files = dict[str, bytes]
_ARCHIVE = (".tar.gz", ".tgz", ".tar")
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def read_files(path: Path, wanted: Collection[str], archives: Collection[str], limit: int) -> Files:
    """Those of the wanted files that an archive holds, or a folder, loose or in archives of these names."""
    found: Files = {}
    for file in _candidates(path, archives):
        if file.name.endswith(_ARCHIVE):
            found |= _read_archive(file, wanted, limit)
        elif (name := plain_name(file.name)) in wanted:
            found[name] = _read_file(file, limit)
    return found


def plain_name(name: str) -> str:
    """A base name without `.gz`; some copies of MNIST write `.idx3` where its home has `-idx3`."""
    return name.rpartition("/")[2].removesuffix(".gz").replace(".idx", "-idx")


def _candidates(path: Path, archives: Collection[str]) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    files = sorted(file for depth in ("*", "*/*", "*/*/*") for file in path.glob(depth) if file.is_file())
    yield from (file for file in files if file.name in archives)
    yield from (file for file in files if not file.name.endswith(_ARCHIVE))


def _read_archive(path: Path, wanted: Collection[str], limit: int) -> Files:
    found: Files = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = plain_name(member.name)
                content = archive.extractfile(member) if member.isreg() and name in wanted else None
                if content is not None:
                    found[name] = _read(content, member.name, limit)
    except _BROKEN as error:
        raise DataError(_broken(path, error)) from error
    return found


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return _read(file, path.name, limit)
    except _BROKEN as error:
        raise DataError(_broken(path, error)) from error


def _read(file: IO[bytes], name: str, limit: int) -> bytes:
    """Read one byte more than the limit at most, which the decoder then refuses: an archive bomb does no harm."""
    if not name.endswith(".gz"):
        return file.read(limit + 1)
    with gzip.open(file) as unpacked:
        content = unpacked.read(limit + 1)
    return bytes(content)


def _broken(path: Path, error: Exception) -> str:
    return (
        f"{path} needs to be a whole archive or file; it is truncated or damaged ({error}). Remove it and get it anew."
    )
