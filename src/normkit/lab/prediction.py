"""Predicting a text character by character: what a model is trained on, and its bits per character."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normkit.lab import data
from normkit.lab.data.types import TextSet

_WINDOWS = 64  # that are tested at once


class Prediction:
    """A text in windows of some length: batches to train on, and bits per character of the test text."""

    def __init__(self, found: TextSet, length: int, test: int | None = None) -> None:
        self._train, self._length = found.train, length
        windows = (len(found.test[:test]) - 1) // length
        self._x = found.test[: windows * length].view(windows, length)
        self._y = found.test[1 : windows * length + 1].view(windows, length)
        self.alphabet = len(found.alphabet)
        counts = (found.train.bincount(minlength=self.alphabet) + 1).double()  # no character is impossible
        self.unigram = float(
            (counts.sum() / counts).log2()[self._y].mean()
        )  # bits by the characters' frequencies alone
        self.chance = float((self._y == counts.argmax()).double().mean())  # the accuracy of always the commonest

    def batches(self, size: int, seed: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from step `start` on, without end."""
        return data.windows(self._train, self._length, size, seed, start)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Bits per character of the test text, each predicted from those before it in its window; and the accuracy."""
        nats, right = 0.0, 0
        for x, y in zip(self._x.split(_WINDOWS), self._y.split(_WINDOWS), strict=True):
            logits = model(x)
            nats += float(loss(logits, y, "sum"))
            right += int((logits.argmax(-1) == y).sum())
        return {"bits": nats / log(2) / self._y.numel(), "accuracy": right / self._y.numel()}


def loss(logits: Tensor, characters: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of (N, L, alphabet) logits, in nats."""
    return cross_entropy(logits.flatten(0, 1), characters.flatten(), reduction=reduction)
