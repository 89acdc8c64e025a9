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
        if isinstance(n, Tensor):
            share = (other.count / n.clamp(min=1)).to(self.mean.dtype)
        elif other.count == 0:
            return self
        elif self.count == 0:
            return other
        else:
            share = torch.as_tensor(other.count / n, dtype=self.mean.dtype, device=self.mean.device)
        gap = other.mean - self.mean
        mean = torch.lerp(self.mean, other.mean, share)
        var = torch.lerp(self.var, other.var, share) + gap.square() * (share * (1 - share))
        # An empty side may hold NaN, which no weight of zero removes: take the other side as it is.
        mean = torch.where(share == 0, self.mean, torch.where(share == 1, other.mean, mean))
        var = torch.where(share == 0, self.var, torch.where(share == 1, other.var, var))
        return Moments(mean, var, n)

    @property
    def unbiased_var(self) -> Tensor:
        """The variance with Bessel's correction, n / (n - 1): what running statistics store."""
        if isinstance(self.count, Tensor):
            n = self.count.to(self.var.dtype)
            return self.var * (n / (n - 1))
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

    The result is what inference normalises with: its variance is the unbiased estimate, as in running_var.
    """
    seen = list(batches)
    if not seen:
        raise ArgumentError("population needs the moments of at least one batch; got none.")
    if method == "pooled":
        total = reduce(Moments.merge, seen)
        return total._replace(var=total.unbiased_var)
    if method == "paper":
        mean = torch.stack([m.mean for m in seen]).mean(0)
        var = torch.stack([m.unbiased_var for m in seen]).mean(0)
        return Moments(mean, var, sum(m.count for m in seen))
    raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
