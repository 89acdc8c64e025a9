"""How far the statistics of a layer have moved."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from normkit.moments import Moments


class Drift(NamedTuple):
    """The distance of new statistics from old ones, in nats: the mean over channels, and the channel that moved most.

    0.5 is a mean that moved by one standard deviation, or a variance that grew to 3.7 times its size.
    """

    mean: float
    worst: float

    def __str__(self) -> str:
        if not math.isfinite(self.worst):
            return "the old ones were not finite, or a variance was negative"
        return f"drift {self.mean:.2g} nats, {self.worst:.2g} in the worst channel"


def drift(old: Moments, new: Moments, eps: float) -> Drift:
    """The symmetrized Kullback-Leibler divergence of two Gaussians per channel: the average of both directions.

    Variances are taken with eps, as the layer divides by them: changes far below eps do not count.
    """
    one, other = ((moments.var.double() + eps).clamp(min=0) for moments in (old, new))
    ratio = one / other
    gap = (new.mean.double() - old.mean.double()).square()
    nats: Tensor = (ratio + 1 / ratio - 2 + gap * (1 / one + 1 / other)) / 4
    return Drift(nats.mean().item(), nats.max().item())
