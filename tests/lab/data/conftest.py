"""Sets of the real kinds, with few images: what is checked of 60,000 is checked of 50."""

import dataclasses
import gzip
import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from normkit.lab.data import load_any, load_text
from normkit.lab.data.catalogue import CATALOGUE, CIFAR10, IDX_FILES, MNIST


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    """Nobody's own data is read or written, and nothing is remembered."""
    folder = tmp_path / "data"
    monkeypatch.setenv("NORMKIT_DATA", str(folder))
    _forget()
    yield folder
    _forget()


def _forget():
    for load in (load_any, load_text):
        load.cache_clear()


class Tiny:
    """A small set under the name of a large one, and its files in every format."""

    def __init__(self, entry, train, test, **changes):
        random = np.random.default_rng(train)
        self.pixels = [random.integers(0, 256, (n, *entry.shape), np.uint8) for n in (train, test)]
        self.labels = [random.integers(0, 10, n, np.uint8) for n in (train, test)]
        self.content = b"".join(p.tobytes() + y.tobytes() for p, y in zip(self.pixels, self.labels, strict=True))
        sha256 = hashlib.sha256(self.content).hexdigest()
        self.entry = dataclasses.replace(entry, train=train, test=test, sha256=sha256, **changes)

    def idx(self):
        parts = [part for half in zip(self.pixels, self.labels, strict=True) for part in half]
        return dict(zip(IDX_FILES, map(_idx, parts), strict=True))

    def idx_gz(self):
        return {f"{name}.gz": gzip.compress(content) for name, content in self.idx().items()}

    def cifar_bin(self):
        return {f"{name}.bin": _records(*batch) for name, *batch in self._batches()}

    def cifar_png(self):
        files = {f"{name}.png": _png(pixels) for name, pixels, _ in self._batches()}
        names = "train_lables.json", "test_lables.json"
        return files | {name: json.dumps(y.tolist()).encode() for name, y in zip(names, self.labels, strict=True)}

    def _batches(self):
        each = len(self.labels[0]) // 5
        for i in range(5):
            yield f"data_batch_{i + 1}", *(part[0][i * each :][:each] for part in (self.pixels, self.labels))
        yield "test_batch", self.pixels[1], self.labels[1]


def _idx(values):
    if values.ndim == 4:
        values = values[:, 0]
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def _records(pixels, labels):
    return np.concatenate([labels[:, None], pixels.reshape(len(pixels), -1)], axis=1).tobytes()


def _png(pixels):
    rows = pixels.reshape(*pixels.shape[:2], -1).transpose(0, 2, 1)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def mnist(monkeypatch):
    tiny = Tiny(MNIST, 50, 20, homes=())
    monkeypatch.setitem(CATALOGUE, "mnist", tiny.entry)
    return tiny


@pytest.fixture
def cifar10(monkeypatch):
    tiny = Tiny(CIFAR10, 25, 7, homes=())
    monkeypatch.setitem(CATALOGUE, "cifar10", tiny.entry)
    return tiny


@pytest.fixture
def write():
    """Put files into a folder."""

    def write(folder, files):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    return write


@pytest.fixture
def pack():
    """Put files into an archive, below a folder of its own as npm and CIFAR's home do."""

    def pack(path, files, below="package"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"{below}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    return pack
