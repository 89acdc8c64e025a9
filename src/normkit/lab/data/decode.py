"""From the files of a set to its canonical bytes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from normkit.lab.data.archives import Files
from normkit.lab.data.catalogue import CIFAR10, FASHION_MNIST, IDX_FILES, MNIST, Bytes, Entry
from normkit.lab.data.pillow import pillow
from normkit.lab.data.types import DataError

_UBYTE = 0x08  # IDX's type of unsigned bytes


class Format(NamedTuple):
    """One way in which a set is handed out."""

    files: tuple[str, ...]
    decode: Callable[[Entry, Files], Bytes]


def formats(entry: Entry) -> tuple[Format, ...]:
    """The ways in which a set is handed out."""
    return _FORMATS[entry.name]


def _from_idx(entry: Entry, files: Files) -> Bytes:
    parts = []
    for name in IDX_FILES:
        count = entry.train if name.startswith("train") else entry.test
        shape = (count, *entry.shape[1:]) if "images" in name else (count,)
        parts.append(_idx(files[name], shape, name))
    return np.concatenate(parts)


def _idx(content: bytes, shape: tuple[int, ...], name: str) -> Bytes:
    """IDX: two zeros, type, rank, the sizes as big-endian 32-bit numbers, then the values."""
    header = bytes([0, 0, _UBYTE, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise DataError(
            f"{name} needs to be an IDX file of {math.prod(shape)} bytes of shape {shape}; "
            f"got {len(content)} bytes that begin with {content[: len(header)].hex() or 'nothing'}."
        )
    return np.frombuffer(content, np.uint8, offset=len(header))


def _count(entry: Entry, name: str) -> int:
    """How many images a file of CIFAR-10 has."""
    return entry.test if name.startswith("test") else entry.train // 5


_CIFAR_BIN = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def _from_cifar_bin(entry: Entry, files: Files) -> Bytes:
    """Each record is a label and then the pixels, colour by colour."""
    record = 1 + math.prod(entry.shape)
    batches = []
    for name in _CIFAR_BIN:
        content = np.frombuffer(files[name], np.uint8)
        count = _count(entry, name)
        if content.size != count * record:
            raise DataError(f"{name} needs {count} records of {record} bytes; got {content.size} bytes.")
        batches.append(content.reshape(-1, record))
    train, test = np.concatenate(batches[:5]), batches[5]
    return np.concatenate([part.ravel() for half in (train, test) for part in (half[:, 1:], half[:, 0])])


_CIFAR_PNG = (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png")
_CIFAR_JSON = ("train_lables.json", "test_lables.json")  # the package's own spelling


def _from_cifar_png(entry: Entry, files: Files) -> Bytes:
    """Each row of an image holds the pixels of one photograph."""
    batches = [_rows(files[name], name, entry) for name in _CIFAR_PNG]
    train, test = (_labels(files[name], name) for name in _CIFAR_JSON)
    return np.concatenate([*batches[:5], train, batches[5], test])


def _rows(content: bytes, name: str, entry: Entry) -> Bytes:
    colours, height, width = entry.shape
    image = pillow().Image
    try:
        with image.open(io.BytesIO(content), formats=["PNG"]) as opened:
            found = np.asarray(opened)
    except Exception as error:  # Pillow's decoders raise whatever the damage leads them to
        raise DataError(f"{name} needs to be a whole PNG image; it cannot be read: {error}.") from error
    needed = (_count(entry, name), height * width, colours)  # rows, pixels, colours
    if found.shape != needed or found.dtype != np.uint8:
        raise DataError(f"{name} needs to be an image of {needed} bytes; got {found.shape} of {found.dtype}.")
    return found.transpose(0, 2, 1).ravel()


def _labels(content: bytes, name: str) -> Bytes:
    try:
        return np.asarray(json.loads(content), dtype=np.uint8).ravel()
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{name} needs to be a list of labels from 0 to 9; it cannot be read: {error}.") from error


_IDX = Format(IDX_FILES, _from_idx)
_FORMATS = {
    MNIST.name: (_IDX,),
    FASHION_MNIST.name: (_IDX,),
    CIFAR10.name: (Format(_CIFAR_BIN, _from_cifar_bin), Format((*_CIFAR_PNG, *_CIFAR_JSON), _from_cifar_png)),
}
