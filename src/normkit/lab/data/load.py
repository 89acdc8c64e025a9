"""Load a set, say which there are, and get those that are not here yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab.data.cache import only_one, own_folder, read_stored, store, stored_path
from normkit.lab.data.catalogue import CATALOGUE, FASHION_MINI, Bytes, Entry, entry_named
from normkit.lab.data.download import DownloadProgress
from normkit.lab.data.fetch import decode_path, sources
from normkit.lab.data.folder import FolderSet, open_folder
from normkit.lab.data.texts import MOBY_MINI, read_text, text_set, unpack
from normkit.lab.data.types import DataError, DataSet, TextSet

DataKind = Literal["small images", "images", "text"]


class Available(NamedTuple):
    """A line of `normkit data list`."""

    name: str
    what: str
    where: str | None  # None: it must be fetched
    size: int  # bytes, unpacked


def load(name_or_path: str) -> DataSet:
    """A set by its name, or a folder of small images; one that was loaded before is not read again."""
    found = load_any(name_or_path)
    if isinstance(found, FolderSet):
        raise ArgumentError(
            "What reads whole sets needs images of one size, of at most 64x64; "
            f"those in {name_or_path} are larger or differ. Make them so, or take another set."
        )
    return found


@lru_cache(maxsize=4)
def load_any(name_or_path: str) -> DataSet | FolderSet:
    """Like `load`, and a folder of larger images becomes a FolderSet, which reads them batch by batch."""
    if name_or_path == MOBY_MINI.name:
        raise ArgumentError(
            f"A set of images is needed, one of {', '.join(CATALOGUE)} or a folder of images; {name_or_path} is a text."
        )
    if name_or_path not in CATALOGUE and _is_path(name_or_path):
        return open_folder(Path(name_or_path).expanduser())
    entry = entry_named(name_or_path)
    content = _local(entry)
    if content is None:
        raise DataError(f"{entry.name} is not on this machine. Run: normkit data get {entry.name}")
    return entry.data_set(content)


@lru_cache(maxsize=4)
def load_text(name_or_path: str) -> TextSet:
    """A text by its name, or a file in UTF-8; one that was loaded before is not read again."""
    if name_or_path == MOBY_MINI.name:
        return text_set(name_or_path, unpack(MOBY_MINI))
    if name_or_path not in CATALOGUE and _is_path(name_or_path):
        return text_set(name_or_path, read_text(Path(name_or_path).expanduser()))
    raise ArgumentError(
        f"A text needs the name {MOBY_MINI.name}, or the path of a file that is there; got {name_or_path!r}."
        f"{did_you_mean(name_or_path, [MOBY_MINI.name])}"
    )


LOADERS: dict[DataKind, Callable[[str], DataSet | FolderSet | TextSet]] = {
    "small images": load,
    "images": load_any,
    "text": load_text,
}
"""By what an experiment takes."""


def is_text(name_or_path: str) -> bool:
    """Whether this is a text and not images: by its name, or as a file and not a folder."""
    is_file = name_or_path not in CATALOGUE and Path(name_or_path).expanduser().is_file()
    return is_file or name_or_path == MOBY_MINI.name


def available() -> list[Available]:
    """Every set that has a name, and where it is; looked up, not read."""
    images = [Available(entry.name, entry.what, _where(entry), entry.size) for entry in CATALOGUE.values()]
    return [*images, Available(MOBY_MINI.name, MOBY_MINI.what, str(MOBY_MINI.path), MOBY_MINI.size)]


def get(name: str, source: str | None = None, progress: DownloadProgress | None = None) -> Path:
    """Fetch a set, and return the file it is in.

    `source`: local, debian, web or npm, the address of a folder on the web, or the path of a folder or an archive.
    Without one, a set that is here is left as it is, and one that is not is looked for in that order.
    """
    if name == MOBY_MINI.name:
        load_text(name)
        return MOBY_MINI.path
    entry = entry_named(name)
    if entry is FASHION_MINI:
        read_stored(entry)
        return stored_path(entry)
    origins = sources(entry, source)
    with only_one(entry):
        if source is None and _is_stored(entry):
            return stored_path(entry)
        failures = []
        for origin in origins:
            try:
                content = origin.fetch(entry, progress or _quiet)
            except DataError as error:
                if origin.is_local:
                    raise
                failures.append(f"{origin.where}: {error}")
                continue
            if content is not None:
                return store(entry, content)
            failures.append(f"{origin.where} has nothing of it.")
    reasons = "".join(f"\n  {reason}" for reason in failures)
    raise DataError(
        f"{name} could not be fetched:{reasons}\n"
        f"Put its files ({', '.join(entry.files)}) into {own_folder(entry)}, or name a --source that has them."
    )


def _quiet(what: str, done: int, total: int | None) -> None:
    """Report nothing."""


def _is_path(text: str) -> bool:
    return os.sep in text or text.startswith((".", "~")) or Path(text).exists()


def _is_stored(entry: Entry) -> bool:
    try:
        return read_stored(entry) is not None
    except DataError:  # to be replaced
        return False


def _local_folders(entry: Entry) -> list[Path]:
    return [own_folder(entry), *([Path(entry.debian)] if entry.debian else [])]


def _local(entry: Entry) -> Bytes | None:
    """What is on this machine already. Only `get` downloads: the sets are large."""
    content = read_stored(entry)
    folders = iter(_local_folders(entry)) if entry is not FASHION_MINI else iter(())
    while content is None and (folder := next(folders, None)) is not None:
        content = decode_path(entry, folder)
    return content


def _where(entry: Entry) -> str | None:
    places = [stored_path(entry), *_local_folders(entry)]
    return next((str(place) for place in places if place.is_file() or (place.is_dir() and any(place.iterdir()))), None)
