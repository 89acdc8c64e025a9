"""Where sets are kept: `NORMKIT_DATA`, or ~/.cache/normkit. A set is one file of its canonical bytes."""

from __future__ import annotations

import lzma
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from normkit.atomic import replacing
from normkit.lab.data.catalogue import FASHION_MINI, Bytes, Entry
from normkit.lab.data.types import DataError
from normkit.lab.locks import lock

EMBEDDED = Path(__file__).parent / "fashion_mini.xz"


def data_folder() -> Path:
    """Where sets are kept."""
    chosen = os.environ.get("NORMKIT_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "normkit"


def own_folder(entry: Entry) -> Path:
    """Where the files of a set may be put by hand, as they come from its home."""
    return data_folder() / entry.name


def stored_path(entry: Entry) -> Path:
    """Where a set is, once it is decoded."""
    return EMBEDDED if entry is FASHION_MINI else data_folder() / f"{entry.name}.bin"


def read_stored(entry: Entry) -> Bytes | None:
    """The canonical bytes of a set that was stored, checked; None: it was not."""
    path = stored_path(entry)
    try:
        content = unpack_mini(path.read_bytes()) if path == EMBEDDED else np.fromfile(path, np.uint8)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise DataError(f"{entry.name} needs {path}; it cannot be read: {error}. Check its permissions.") from error
    remedy = "Install normkit anew." if path == EMBEDDED else f"`normkit data get {entry.name}` replaces it."
    entry.check(content, str(path), remedy)
    return content


def store(entry: Entry, content: Bytes) -> Path:
    """Put canonical bytes in place; a reader finds all of them or none."""
    path = stored_path(entry)
    try:
        with replacing(path) as part:
            content.tofile(part)
    except OSError as error:
        raise DataError(
            f"{entry.name} needs {entry.size} bytes at {path}; they cannot be written: {error}. Make room, or set "
            "NORMKIT_DATA to another folder."
        ) from error
    return path


@contextmanager
def only_one(entry: Entry) -> Iterator[None]:
    """Wait until no other process is fetching the same set."""
    path = data_folder() / f"{entry.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115, closed below
    except OSError as error:
        raise DataError(
            f"Data needs a folder that can be written; got {path.parent}: {error}. Set NORMKIT_DATA to another."
        ) from error
    with file:
        lock(file, wait=math.inf)
        yield


# fashion-mini is embedded column by column, which compresses 4% better than row by row.


def pack_mini(content: Bytes) -> bytes:
    """Canonical bytes of fashion-mini as they are embedded."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
    return lzma.compress(_swap(content).tobytes(), check=lzma.CHECK_CRC32, filters=filters)


def unpack_mini(packed: bytes) -> Bytes:
    """Undo `pack_mini`."""
    content = np.frombuffer(lzma.decompress(packed), np.uint8)
    return _swap(content) if content.size == FASHION_MINI.size else content


def _swap(content: Bytes) -> Bytes:
    """Rows for columns, in every image."""
    swapped = content.copy()
    data_set = FASHION_MINI.data_set(swapped)
    for images in (data_set.train, data_set.test):
        images.pixels.copy_(images.pixels.transpose(2, 3).clone())
    return swapped
