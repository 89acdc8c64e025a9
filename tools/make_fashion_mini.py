"""Make fashion-mini out of Fashion-MNIST again: `python tools/make_fashion_mini.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from normkit.lab.data.cache import EMBEDDED, pack_mini
from normkit.lab.data.catalogue import FASHION_MINI, Bytes
from normkit.lab.data.load import load
from normkit.lab.data.types import DataSet, Images


def choose(full: DataSet) -> Bytes:
    """The first images of every class, in the order in which they stand in the full set."""
    return np.concatenate(
        [*_first(full.train, FASHION_MINI.train // 10), *_first(full.test, FASHION_MINI.test // 10)],
    )


def _first(images: Images, each: int) -> Sequence[Bytes]:
    chosen = torch.cat([_places(images.labels, label)[:each] for label in range(10)]).sort().values
    return images.pixels[chosen].numpy().ravel(), images.labels[chosen].numpy().astype(np.uint8)


def _places(labels: Tensor, label: int) -> Tensor:
    return (labels == label).nonzero()[:, 0]


if __name__ == "__main__":
    content = choose(load("fashion-mnist"))
    EMBEDDED.write_bytes(pack_mini(content))
    print(
        f"{EMBEDDED}: {EMBEDDED.stat().st_size} bytes, sha256 of the images {hashlib.sha256(content.data).hexdigest()}"
    )
