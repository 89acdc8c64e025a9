"""What a data set is, once it is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from normkit.errors import NormkitError


class DataError(NormkitError, ValueError):
    """Data that is missing, damaged, or not what it should be."""


class Images(NamedTuple):
    """Images as they were stored, and what is on them."""

    pixels: Tensor  # uint8, (N, C, H, W)
    labels: Tensor  # int64, (N,)


@dataclass(frozen=True)
class DataSet:
    """A set in memory. All who load it share its tensors, which must not be changed."""

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images

    @property
    def is_large(self) -> bool:
        """Whether there is enough to train for longer at the same scale."""
        return len(self.train.labels) >= 50_000


@dataclass(frozen=True)
class TextSet:
    """A text in memory, as places in its alphabet. All who load it share its tensors, which must not be changed."""

    name: str
    alphabet: str  # every character of the text once, sorted
    train: Tensor  # int64, (characters,)
    test: Tensor  # what follows
