"""What a norm stores, and what the batches gave it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.moments import Moments
from normkit.surgery.norms import STATISTICS, Norm

# Channels whose variance is this part of a layer's median variance, or less, are dead: what they store is compared with
# nothing, because a distance in their own standard deviations means nothing.
_DEAD = 1e-3
_FARTHEST = 3.0  # standard deviations by which one channel counts at most, so that none speaks for its whole layer


class Call(NamedTuple):
    """One call of a norm across examples, on one of the batches.

    Attributes:
        batch: the number of the batch.
        position: how many calls of this layer came before it in the same forward.
        shape: of its input.
        examples: how many the statistics are taken over, on all ranks if they are synchronized.
        moments: mean and biased variance per channel, in double precision, on the CPU.
        scatter: per channel, the sum of squares of the examples' own means about the mean of the batch.
    """

    batch: int
    position: int
    shape: tuple[int, ...]
    examples: int
    moments: Moments
    scatter: Tensor

    @property
    def values(self) -> int:
        """Values per channel; where channels differ, of the one with the fewest."""
        count = self.moments.count
        return int(count.min()) if isinstance(count, Tensor) else int(count)

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in it."""
        return bool(self.moments.mean.isfinite().all() and self.moments.var.isfinite().all())


@dataclass
class LayerStatistics:
    """A norm whose statistics are taken across examples: what it stores, and what the batches gave it.

    Attributes:
        norm: the layer.
        stored: what it normalizes with in evaluation, in double precision; None if it stores nothing.
        tracked: how many batches have updated that, as it counts them itself; None if it does not count.
        calls: with the statistics of each batch in all norms, everything else as in evaluation.
        training: pooled moments of what it is given in training mode, dropout included; None if that is not known.
        by_rank: the same of every rank, each by its own batches; empty where there are no other ranks.
    """

    norm: Norm
    stored: Moments | None
    tracked: int | None
    calls: list[Call] = field(default_factory=list)
    training: Moments | None = None
    by_rank: list[LayerStatistics] = field(default_factory=list)

    @classmethod
    def of(cls, norm: Norm) -> LayerStatistics:
        """Read what a layer stores now."""
        mean, var, counted = (getattr(norm.layer, name, None) for name in STATISTICS)
        stored = None
        if isinstance(mean, Tensor) and isinstance(var, Tensor):
            stored = Moments(plain(mean), plain(var), 0)
        return cls(norm, stored, int(counted) if isinstance(counted, Tensor) else None)

    @property
    def finite_calls(self) -> list[Call]:
        """The calls with finite input of more than one value."""
        return [call for call in self.calls if call.is_finite and call.values > 1]

    @property
    def every_call(self) -> list[Call]:
        """Those on all ranks, in one order: every rank has the same."""
        return [call for one in self.by_rank or [self] for call in one.finite_calls]

    @cached_property
    def data(self) -> Moments | None:
        """Mean and biased variance over all values of all batches, on all ranks; None if there are too few."""
        calls = self.every_call
        return reduce(Moments.merge, [call.moments for call in calls]) if calls else None

    @cached_property
    def is_untrained(self) -> bool:
        """Whether what it stores are the values that a new layer has."""
        if self.stored is None:
            return False
        return bool((self.stored.mean == 0).all() and (self.stored.var == 1).all())

    @cached_property
    def noise(self) -> float | None:
        """The standard error of a batch's mean, in standard deviations: the root mean square over channels.

        From how far the means of single examples scatter, so that it holds for few batches, and counts the positions of
        one example for no more than they tell. None if there are fewer than two examples.
        """
        calls, data = self.every_call, self.data
        if data is None:
            return None
        # A synchronized call counts the examples of all ranks, on each of them; its scatter is that of the rank's own.
        copies = len(self.by_rank) if self.by_rank and self.norm.spec.scope == "synced" else 1
        degrees = sum(call.examples - 1 for call in calls) / copies
        if degrees > 0:
            scatter = sum((call.scatter for call in calls), torch.zeros_like(data.mean)) / degrees
        elif len(calls) > 1:
            scatter = torch.stack([call.moments.mean for call in calls]).var(0)
        else:
            return None
        size = sum(call.examples for call in calls) / len(calls)
        alive = self._alive(data)
        return (scatter[alive] / size / data.var[alive]).mean().sqrt().item() if alive.any() else None

    @cached_property
    def distance(self) -> float | None:
        """How far what is stored is from the data, in the data's standard deviations, beyond the noise of the data.

        The larger of that of the means and of the standard deviations, each as a root mean square over channels. What
        is stored may be that of the data without dropout or with it: the nearer counts.
        """
        known = [moments for moments in (self.data, self.training) if moments is not None]
        found = [distance for moments in known if (distance := self.distance_from(moments)) is not None]
        return min(found, default=None)

    @property
    def initial_part(self) -> float:
        """The part of the initial values, mean 0 and variance 1, that so many updates leave in a moving average."""
        momentum = self.norm.spec.momentum
        return 0.0 if self.tracked is None or momentum is None else (1 - momentum) ** self.tracked

    @cached_property
    def is_still_arriving(self) -> bool:
        """Whether what is left of the initial values explains the distance from the data."""
        left = self.initial_part
        if self.stored is None or self.data is None or not 0 < left < 1:
            return False
        mean, var = self.stored.mean / (1 - left), (self.stored.var - left) / (1 - left)
        without = LayerStatistics(
            self.norm, Moments(mean, var.clamp(min=0), 0), self.tracked, self.calls, self.training, self.by_rank
        )
        return (without.distance or 0.0) < (self.distance or 0.0) / 2

    def distance_from(self, data: Moments) -> float | None:
        """The distance of what is stored from given moments."""
        if self.stored is None or not (self.stored.mean.isfinite().all() and (self.stored.var >= 0).all()):
            return None
        alive = self._alive(data)
        if not alive.any():
            return None
        std, own = self._std(data)[alive], self._std(self.stored)[alive]
        of_mean = _rms((self.stored.mean - data.mean)[alive] / std)
        noise = (self.noise or 0.0) / max(len(self.every_call), 1) ** 0.5
        return max(math.sqrt(max(of_mean**2 - noise**2, 0.0)), _rms(own / std - 1))

    def _std(self, moments: Moments) -> Tensor:
        return (moments.var + (self.norm.spec.eps or 0.0)).sqrt()

    def _alive(self, data: Moments) -> Tensor:
        floor = max(
            _DEAD * data.var.median().item(), (self.norm.spec.eps or 0.0) * _DEAD, torch.finfo(torch.double).tiny
        )
        return data.var > floor


def plain(statistic: Tensor) -> Tensor:
    """A copy of one statistic per channel, flat, in double precision, on the CPU."""
    return statistic.detach().cpu().double().flatten()


def _rms(distances: Tensor) -> float:
    return distances.clamp(-_FARTHEST, _FARTHEST).square().mean().sqrt().item()
