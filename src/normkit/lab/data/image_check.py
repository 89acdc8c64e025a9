"""Whether all images of a folder can be read, found out before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from normkit.lab.bar import shown_bar
from normkit.lab.data.image_files import Header, check_image
from normkit.lab.data.prefetch import prefetch
from normkit.lab.data.types import DataError

AT_ONCE = 256  # files between two looks at what was found
LARGE = 2000  # files from which on it takes long enough to show how far it is
SHOWN = 5  # broken files that an error names


def check_images(files: Sequence[Path], workers: int) -> list[Header]:
    """Open every file, and return sizes and modes; an error names the first that cannot be read, or are cut off."""
    parts = [files[at : at + AT_ONCE] for at in range(0, len(files), AT_ONCE)]
    headers: list[Header] = []
    broken: list[DataError] = []
    with shown_bar("images checked", len(files), Console(stderr=True) if len(files) >= LARGE else None) as show:
        for found in prefetch(_header_or_error, parts, workers):
            headers += [one for one in found if not isinstance(one, DataError)]
            broken += [one for one in found if isinstance(one, DataError)]
            show(len(headers) + len(broken))
    if broken:
        raise _all_of(broken, len(files))
    return headers


def _header_or_error(path: Path) -> Header | DataError:
    try:
        return check_image(path)
    except DataError as error:
        return error


def _all_of(broken: Sequence[DataError], total: int) -> DataError:
    if len(broken) == 1:
        return broken[0]
    lines = [str(error) for error in broken[:SHOWN]]
    more = [f"and {len(broken) - SHOWN} more"] if len(broken) > SHOWN else []
    return DataError("\n  ".join([f"{len(broken)} of {total} images cannot be used:", *lines, *more]))
