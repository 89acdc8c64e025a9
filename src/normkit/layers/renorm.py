"""Batch Renormalization (Ioffe 2017): training output that agrees with evaluation, for small or skewed batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.kernels.hold import hold
from normkit.kernels.reference import working_dtype
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm
from normkit.moments import Moments, ema
from normkit.tracing import is_recomputing, is_transformed

Schedule = Callable[[int], tuple[float, float]]


def renorm_schedule(total_steps: int) -> Schedule:
    """The paper's limits, scaled to a run of `total_steps`: plain BN for 3%, d_max 5 at 16%, r_max 3 at 25%.

    The paper had 160,000 steps: r_max = 1 and d_max = 0 for 5,000, then r_max up to 3 at 40,000, d_max to 5 at 25,000.
    """
    if total_steps < 1:
        raise ArgumentError(f"renorm_schedule needs the number of training steps; got {total_steps}.")
    return partial(_paper_limits, total_steps)  # not a closure: a layer with a schedule can be pickled


def _paper_limits(total_steps: int, step: int) -> tuple[float, float]:
    def risen(end: float) -> float:
        paper_step = step * 160_000 / total_steps
        return min(max((paper_step - 5_000) / (end - 5_000), 0.0), 1.0)

    return 1 + 2 * risen(40_000), 5 * risen(25_000)


class BatchRenorm(BatchNorm):
    """What the renorms share.

        y = activation(((x - mean) / std * r + d) * weight + bias + residual)
        r = clip(std / running_std, 1 / r_max, r_max),  d = clip((mean - running_mean) / running_std, -d_max, d_max)

    r and d carry no gradient. While neither is clipped, the output is that of evaluation. As in the paper it is the
    standard deviation that is averaged; `running_var` holds its square, for evaluation and for torch.

    Args, beyond BatchNorm's:
        r_max, d_max: the limits.
        warmup_steps: so many first batches, by num_batches_tracked, are normalized as a BatchNorm would: r = 1, d = 0.
        schedule: a function of the step, num_batches_tracked, that gives (r_max, d_max) instead.
    """

    _beyond = "a correction towards its running statistics"
    warmup_steps = 0  # also in layers that were pickled before this option existed

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 0,
        schedule: Schedule | None = None,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
        inplace: bool = False,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            activation=activation,
            negative_slope=negative_slope,
            nonfinite=nonfinite,
            inplace=inplace,
        )
        if not (r_max >= 1 and d_max >= 0):
            raise ArgumentError(f"r_max must be at least 1 and d_max at least 0; got {r_max} and {d_max}.")
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise ArgumentError(f"warmup_steps must be a number of batches, 0 or more; got {warmup_steps!r}.")
        if warmup_steps and schedule is not None:
            raise ArgumentError(
                f"warmup_steps and schedule both set the first limits; got warmup_steps={warmup_steps} and a schedule. "
                "Let the schedule return (1.0, 0.0) for those steps, or leave it out."
            )
        checks.tracked(self.track_running_stats, type(self).__name__)
        self.r_max, self.d_max, self.warmup_steps, self.schedule = r_max, d_max, warmup_steps, schedule
        self._last: Tensor | tuple[Tensor, Tensor] | None = None  # r and d: as one, if the loops have set them

    def _normalize_and_store_(self, input: Tensor, terms: Terms, stored: Moments) -> Tensor:
        done = batch_core.renormalize(input, terms, stored, self.momentum, partial(self._limits, stored))
        if done is not None:
            y, _, self._last = done
            return y
        y, batch = self._normalize_batch(input, terms, stored)
        self._update_(stored, batch)
        return y

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        if stored is None or batch_core.has_no_values(input):
            return super()._normalize_batch(input, terms, stored)
        if isinstance(self._last, Tensor) and is_recomputing():  # the same way, with what is saved on it
            done = batch_core.renormalize(input, terms, stored, None, None, self._last)
            if done is not None:
                return done[:2]
        # Detached, not only under no_grad: forward mode must not see r and d move either.
        batch = batch_core.moments_of(input.detach(), terms.features, terms.mask, terms.who)
        checks.enough_values(batch.count, input, terms.who)
        r, d = self._correction(batch, stored)
        weight = r if self.weight is None else self.weight * r
        shift = d if self.weight is None else self.weight * d
        bias = shift if self.bias is None else self.bias + shift
        return batch_core.normalize_known(input, batch, terms._replace(weight=weight, bias=bias))

    def _correction(self, batch: Moments, stored: Moments) -> tuple[Tensor, Tensor]:
        if is_recomputing() and self._last is not None:
            r, d = self._last  # the running statistics have moved since the forward that this one repeats
            return r, d
        r_max, d_max = self._scheduled(stored)
        std, running_std = self._std(batch), self._std(stored)
        r = (std / running_std).clamp(1 / r_max, r_max)
        d = ((batch.mean - stored.mean) / running_std).clamp(-d_max, d_max)
        if self.warmup_steps:  # decided among tensors: compiled code must not depend on how many batches there were
            is_cold = torch.as_tensor(stored.count, device=r.device) < self.warmup_steps
            r, d = torch.where(is_cold, 1.0, r), torch.where(is_cold, 0.0, d)
        if not (torch.compiler.is_compiling() or is_transformed(r)):
            self._last = r, d
        return hold(r), hold(d)

    def _limits(self, stored: Moments) -> tuple[float, float]:
        """The limits of this step, for the loops, whose counts are numbers that can be read."""
        if self.warmup_steps and int(stored.count) < self.warmup_steps:
            return 1.0, 0.0
        return self._scheduled(stored)

    def _scheduled(self, stored: Moments) -> tuple[float, float]:
        return (self.r_max, self.d_max) if self.schedule is None else self.schedule(int(stored.count))

    def _update_(self, stored: Moments, batch: Moments) -> None:
        if not isinstance(batch.count, Tensor) and batch.count == 0:
            super()._update_(stored, batch)  # no values, and no deviation that could move along
            return
        factor = batch_core.average_factor(stored, self.momentum)
        new = ema(stored._replace(var=self._std(stored)), batch._replace(var=self._std(batch)), factor)
        new = new._replace(var=new.var.square() - self.eps)
        batch_core.write_(stored, batch_core.settle(stored, new, self.nonfinite))

    def _std(self, m: Moments) -> Tensor:
        return (m.var.to(working_dtype(m.var)) + self.eps).sqrt()

    def _is_torchs(self, **extras: Any) -> bool:
        return not self.training and super()._is_torchs(**extras)

    def extra_repr(self) -> str:
        """BatchNorm's line, and the limits."""
        warmup = f", warmup_steps={self.warmup_steps}" if self.warmup_steps else ""
        return super().extra_repr() + f", r_max={self.r_max}, d_max={self.d_max}{warmup}"


class BatchRenorm1d(BatchRenorm, nn.BatchNorm1d, one_step=True):
    """Batch renormalization of (N, C) or (N, C, L)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class BatchRenorm2d(BatchRenorm, nn.BatchNorm2d, one_step=True):
    """Batch renormalization of (N, C, H, W)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d


class BatchRenorm3d(BatchRenorm, nn.BatchNorm3d, one_step=True):
    """Batch renormalization of (N, C, D, H, W)."""

    _ranks = (5,)
    _torch = nn.BatchNorm3d
