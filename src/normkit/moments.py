"""Statistics as values that know their weight.

One `merge` serves chunks, ranks and recalibration. `ema` is the update of running statistics in Python; the C++ core
has its own for what it updates in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from normkit.errors import ArgumentError

PopulationMethod = Literal["pooled", "paper"]


class Moments(NamedTuple):
    """Mean, biased variance, and the number of values they are taken over.

    `count` is a number, or a tensor that broadcasts against `mean` where it is only known at run time (masks, ranks).
    """

    mean: Tensor
    var: Tensor
    count: int | Tensor  # type: ignore[assignment]  # hides tuple.count, of no use here

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values taken together.

        Associative and commutative up to rounding (Chan et al. 1979): variances are combined about the joint mean,
        so nothing cancels. Moments of no values, whatever they hold, change nothing.
        """
        n = self.count + other.count
        mine, theirs = self, other
        if isinstance(n, Tensor):
            # A weight of zero does not remove a NaN: an empty side takes the other's values, and then weighs nothing.
            mine, theirs = self._where_empty(other), other._where_empty(self)
            n = n.clamp(min=1)
        elif other.count == 0:
            return self
        elif self.count == 0:
            return other
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        my_share, their_share = (
            torch.as_tensor(count, dtype=wide, device=self.mean.device) / n for count in (self.count, other.count)
        )
        gap = theirs.mean - mine.mean
        mean = torch.lerp(mine.mean.to(wide), theirs.mean.to(wide), their_share)
        var = my_share * mine.var + their_share * theirs.var + my_share * their_share * gap.square()
        return Moments(mean, var, self.count + other.count)

    def _where_empty(self, other: Moments) -> Moments:
        empty = torch.as_tensor(self.count == 0, device=self.mean.device)
        return Moments(torch.where(empty, other.mean, self.mean), torch.where(empty, other.var, self.var), self.count)

    def detach(self) -> Moments:
        """Return the same values without their history."""
        return self._replace(mean=self.mean.detach(), var=self.var.detach())

    def pooled(self, dim: int, keepdim: bool = False) -> Moments:
        """Return the moments of all sets of values along a dimension taken together; a plain count is that of each."""
        if not isinstance(self.count, Tensor) or self.count.dim() == 0:
            mean = self.mean.mean(dim, keepdim=True)
            var = (self.var + (self.mean - mean).square()).mean(dim, keepdim=keepdim)
            return Moments(mean if keepdim else mean.squeeze(dim), var, self.count * self.mean.shape[dim])
        count = self.count.expand(self.mean.shape)
        n = count.sum(dim, keepdim=True)
        share = count / n.clamp(min=1).to(self.mean.dtype)
        own_mean, own_var = (torch.where(count > 0, t, 0) for t in (self.mean, self.var))  # empty: whatever they hold
        mean = (share * own_mean).sum(dim, keepdim=True)
        var = (share * (own_var + (own_mean - mean).square())).sum(dim, keepdim=keepdim)
        return Moments(mean, var, n) if keepdim else Moments(mean.squeeze(dim), var, n.squeeze(dim))

    @property
    def unbiased_var(self) -> Tensor:
        """The variance with Bessel's correction, n / (n - 1), which running statistics store."""
        return unbiased_var(self)


def unbiased_var(of: Moments) -> Tensor:
    """`Moments.unbiased_var`, for code that is compiled: torch 2.10 cannot trace a property of a named tuple."""
    _, var, count = of
    if isinstance(count, Tensor):
        n = count.to(var.dtype)
        return var * (n / (n - 1).clamp(min=0))
    return var * (count / (count - 1)) if count > 1 else var * torch.inf


def ema(stored: Moments, batch: Moments, momentum: float | Tensor) -> Moments:
    """Move `stored` towards `batch`. Momentum weights the new value, as everywhere in torch; `count` counts batches."""
    return Moments(
        moved(stored.mean, batch.mean, momentum),
        moved(stored.var, batch.var, momentum),
        stored.count + 1,
    )


def moved(stored: Tensor, batch: Tensor, momentum: float | Tensor) -> Tensor:
    """Return one running statistic after a batch: what `ema` does to each of the two."""
    return (1 - momentum) * stored + momentum * batch


class Population:
    """Estimates a population's statistics from those of training batches (Ioffe & Szegedy 2015, Algorithm 2).

    "pooled": mean and unbiased variance over all values of all batches, whatever their sizes.
    "paper": the plain average of the batches' means, and of their unbiased variances.

    Batches are added one by one, and only the estimate is kept.
    """

    def __init__(self, method: PopulationMethod = "pooled") -> None:
        if method not in get_args(PopulationMethod):
            raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
        self._method = method
        self._seen: Moments | None = None
        self.batches = 0

    def add(self, batch: Moments) -> None:
        """Take the moments of one more batch into account."""
        if self._method == "paper":
            batch = _with_unbiased_var(batch)
        self.batches += 1
        if self._seen is None:
            self._seen = batch
        elif self._method == "pooled":
            self._seen = self._seen.merge(batch)
        else:
            count = self._seen.count + batch.count
            self._seen = ema(self._seen, batch, 1 / self.batches)._replace(count=count)

    def result(self) -> Moments:
        """What inference normalizes with: its variance is the unbiased estimate, as in running_var."""
        if self._seen is None:
            raise ArgumentError("population needs the moments of at least one batch; got none.")
        return self._seen._replace(var=self._seen.unbiased_var) if self._method == "pooled" else self._seen


def population(batches: Iterable[Moments], method: PopulationMethod = "pooled") -> Moments:
    """Estimate the population's statistics from the moments of training batches, as `Population` does."""
    estimate = Population(method)
    for batch in batches:
        estimate.add(batch)
    return estimate.result()


def _with_unbiased_var(batch: Moments) -> Moments:
    if isinstance(batch.count, int) and batch.count < 2:
        raise ArgumentError('method "paper" needs batches of more than 1 value, to have a variance; use "pooled".')
    return batch._replace(var=batch.unbiased_var)
