"""A short text that differs where data does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import Tensor

from normkit.lab.data.folder import FolderSet
from normkit.lab.data.types import DataSet, TextSet


def digest_of(found: DataSet | FolderSet | TextSet) -> str:
    """Of all that is in memory; of a folder that is not, of the names and sizes of its files."""
    digest = hashlib.sha256()
    for part in _parts(found):
        digest.update(part)
    return digest.hexdigest()[:16]


def _parts(found: DataSet | FolderSet | TextSet) -> Iterator[bytes]:
    if isinstance(found, FolderSet):
        for file in (*found.train.files, *found.test.files):
            yield f"{file.relative_to(found.path).as_posix()} {file.stat().st_size}\n".encode()
    elif isinstance(found, TextSet):
        yield found.alphabet.encode()
        yield from map(_bytes, (found.train, found.test))
    else:
        yield repr(found.classes).encode()
        yield from map(_bytes, (*found.train, *found.test))


def _bytes(tensor: Tensor) -> bytes:
    return repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes()
