"""Statistics as values that know their weight.

One `merge` serves threads, ghost chunks, ranks and recalibration; one `ema` serves every running statistic.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normkit.errors import ArgumentError


class Moments(NamedTuple):
    """Mean, biased variance, and the number of values behind them.

    `count` is a number, or a tensor that broadcasts against `mean` where it is only known at run time (masks, ranks).
    """

    mean: Tensor
    var: Tensor
    count: int | Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody asks of moments

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values taken together.

        Associative and commutative up to rounding (Chan et al. 1979): variances are combined about the joint mean,
        so nothing cancels. Moments of no values, whatever they hold, change nothing.
        """
        n = self.count + other.count
        mine, theirs = self, other
        if isinstance(n, Tensor):
            # No weight of zero removes a NaN: an empty side takes the other's values, and then weighs nothing.
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

    @property
    def unbiased_var(self) -> Tensor:
        """The variance with Bessel's correction, n / (n - 1): what running statistics store."""
        if isinstance(self.count, Tensor):
            n = self.count.to(self.var.dtype)
            return self.var * (n / (n - 1).clamp(min=0))
        return self.var * (self.count / (self.count - 1)) if self.count > 1 else self.var * torch.inf


def ema(stored: Moments, batch: Moments, momentum: float | Tensor) -> Moments:
    """Move `stored` towards `batch`. Momentum weights the new value, as everywhere in torch; `count` counts batches."""
    return Moments(
        (1 - momentum) * stored.mean + momentum * batch.mean,
        (1 - momentum) * stored.var + momentum * batch.var,
        stored.count + 1,
    )


def population(batches: Iterable[Moments], method: Literal["pooled", "paper"] = "pooled") -> Moments:
    """Estimate the population's statistics from those of training batches (Ioffe & Szegedy 2015, Algorithm 2).

    "pooled": mean and unbiased variance over all values of all batches, whatever their sizes.
    "paper": the plain average of the batches' means, and of their unbiased variances.

    The result is what inference normalizes with: its variance is the unbiased estimate, as in running_var.
    """
    seen = list(batches)
    if not seen:
        raise ArgumentError("population needs the moments of at least one batch; got none.")
    if method == "pooled":
        total = reduce(Moments.merge, seen)
        return total._replace(var=total.unbiased_var)
    if method == "paper":
        if any(isinstance(m.count, int) and m.count < 2 for m in seen):
            raise ArgumentError('method "paper" needs batches of more than 1 value, to have a variance; use "pooled".')
        mean = torch.stack([m.mean for m in seen]).mean(0)
        var = torch.stack([m.unbiased_var for m in seen]).mean(0)
        return Moments(mean, var, sum(m.count for m in seen))
    raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
