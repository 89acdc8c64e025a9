"""Texts to predict character by character: one inside the package, and files of your own."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from normkit.lab.data.types import DataError, TextSet

SHORTEST = 10_000  # characters
_TEST = 10  # the last tenth


class Text(NamedTuple):
    """A text with a name, inside the package."""

    name: str
    what: str
    path: Path  # UTF-8, compressed
    size: int  # bytes, unpacked
    sha256: str  # of these


MOBY_MINI = Text(
    "moby-mini",
    "472,820 characters: chapters 1 to 48 of Moby-Dick, inside the package",
    Path(__file__).parent / "moby_mini.xz",
    474_100,
    "a735ea31d3cd86a200e2910bc451130a3e3bde3d6dcd4adb317122ea50f640c4",
)


def unpack(text: Text) -> str:
    """A text of the package, checked."""
    try:
        content = lzma.decompress(text.path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{text.name} needs {text.path}; it cannot be read: {error}. Install normkit anew.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != text.sha256:
        raise DataError(
            f"{text.name} needs the text with sha256 {text.sha256}; that of {text.path} has {found}. "
            "Install normkit anew."
        )
    return content.decode()


def read_text(path: Path) -> str:
    """A file of your own; lines may end in any way."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"A text needs a file that can be read; got {path}: {error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} needs to be text in UTF-8; its byte {error.start} is not. Save it in UTF-8, or take another file."
        ) from error
    if len(text) < SHORTEST:
        raise DataError(f"{path} needs {SHORTEST:,} characters or more; it has {len(text):,}. Take a longer text.")
    return "\n".join(text.splitlines())


def text_set(name: str, text: str) -> TextSet:
    """A text as numbers, its last tenth for testing."""
    codes = torch.from_numpy(np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64))
    alphabet, places = codes.unique(return_inverse=True)
    at = len(text) - len(text) // _TEST
    return TextSet(name, "".join(map(chr, alphabet.tolist())), places[:at], places[at:])
