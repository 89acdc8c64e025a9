"""The predictions of a classifier over many batches: how certain they are, and how many classes they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributions import Categorical

from normkit.batches import tensors_in
from normkit.errors import ArgumentError

Logits = Callable[[Any], Tensor] | Literal["first"] | None


class Collapse(Exception):
    """An adaptation has gone wrong, as the message says. It never leaves a verb."""


class Predictions(NamedTuple):
    """Entropies, in nats, over all examples.

    Attributes:
        entropy: of single predictions, on average: how uncertain the model is.
        mean_entropy: of the mean prediction: how evenly it uses its classes. It falls when one class is left.
        classes: the effective number of classes that it predicts: the exponential of the entropy of their shares.
    """

    entropy: float
    mean_entropy: float
    classes: float

    def __str__(self) -> str:
        return f"entropy {self.entropy:.2f}, of the mean prediction {self.mean_entropy:.2f}, {self.classes:.1f} classes"

    def faded(self, share: float) -> Predictions:
        """As if they had been less varied: with this share of the entropies, down to one class."""
        return Predictions(share * self.entropy, share * self.mean_entropy, self.classes**share)

    def check(self, varied: Predictions | None, collapse: float) -> None:
        """Raise `Collapse` if these are not numbers, or name far fewer classes than those at their most varied."""
        if not math.isfinite(self.entropy):
            raise Collapse("predictions became NaN or infinite.")
        if varied is None:
            return
        if self.mean_entropy < collapse * varied.mean_entropy and self.classes < varied.classes:
            raise Collapse(f"predictions collapsed, from {varied} to {self}.")


class Ballot:
    """Adds up predictions batch by batch."""

    def __init__(self) -> None:
        self._entropy = 0.0
        self._examples = 0.0
        self._sum: Tensor = torch.zeros(())
        self._named: Tensor = torch.zeros(())

    @torch.no_grad()
    def add(self, logits: Tensor) -> None:
        """Count the predictions of a batch: (N, classes)."""
        logits = logits.detach().to("cpu", torch.float64)
        chances = logits.softmax(1)
        self._entropy += entropies(logits).sum().item()
        self._examples += len(logits)
        self._sum = self._sum + chances.sum(0)
        self._named = self._named + torch.bincount(chances.argmax(1), minlength=logits.shape[1])

    def fade(self, share: float) -> None:
        """Let what was counted so far weigh only this share of what it did."""
        self._entropy, self._examples = share * self._entropy, share * self._examples
        self._sum, self._named = share * self._sum, share * self._named

    def join(self, other: Ballot) -> None:
        """Add what another has counted."""
        self._entropy, self._examples = self._entropy + other._entropy, self._examples + other._examples
        self._sum, self._named = self._sum + other._sum, self._named + other._named

    @property
    def examples(self) -> float:
        """The number of predictions counted, those that have faded as the share that is left of them."""
        return self._examples

    def merge_ranks(self, group: Any, device: torch.device | None) -> None:
        """Add up what all ranks of a group have counted."""
        single = torch.tensor([self._entropy, self._examples], dtype=torch.float64)
        packed = torch.cat([single, self._sum.flatten().double(), self._named.flatten().double()]).to(device)
        distributed.all_reduce(packed, group=group)
        (self._entropy, self._examples), (self._sum, self._named) = packed[:2].tolist(), packed[2:].cpu().chunk(2)

    def predictions(self) -> Predictions | None:
        """What was counted; None if nothing was."""
        if not self._examples:
            return None
        share = _entropy(self._named / self._examples)
        return Predictions(
            self._entropy / self._examples,
            _entropy(self._sum / self._examples),
            math.exp(share) if math.isfinite(share) else math.nan,
        )


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each prediction: (N, classes) to (N)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found: Tensor = Categorical(logits=wide, validate_args=False).entropy()  # unchecked: callers report a NaN
    return found


def _entropy(chances: Tensor) -> float:
    return float(torch.special.entr(chances).sum())


def logits_of(output: Any, logits: Logits) -> Tensor | None:
    """The logits in a model's output, as (N, classes); None if there are none.

    In (N, classes, ...) every position is a prediction. "first" takes the first tensor, if its shape is that of logits.
    """
    if logits is None:
        return None
    found = next(iter(tensors_in(output)), None) if logits == "first" else logits(output)
    fits = isinstance(found, Tensor) and found.is_floating_point() and found.dim() >= 2 and found.shape[1] >= 2
    if not fits and logits == "first":
        return None
    if not fits:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ArgumentError(f"logits must return a tensor (N, classes) or (N, classes, ...); got {got}.")
    assert isinstance(found, Tensor)
    return found.movedim(1, -1).flatten(0, -2)
