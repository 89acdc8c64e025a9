"""Moving average batch normalization (Yan et al. 2020), for batches too small to have statistics of their own."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.errors import ArgumentError
from normkit.functional.batch_core import average_factor
from normkit.kernels import select
from normkit.kernels.moving import OVER, Statistics
from normkit.kernels.reference import Recipe
from normkit.layers.affine_parts import Affine
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments, moved
from normkit.tracing import is_recomputing, is_transformed

RATIO_FROM = 1000  # batches, before the running variance is trusted to correct a batch's
RATIO_MAX = 5.0


class _Passed(NamedTuple):
    """A batch that was normalized: its mean square identifies it when activation checkpointing repeats it."""

    square: Tensor
    used: Statistics


class MovingBatchNorm2d(ChannelNorm):
    """Normalization by the root mean square of the last batches, of (N, C, H, W), without centering.

        y = x / sqrt(var + eps) * ratio * weight + bias,  ratio = clip(sqrt(var + eps) / sqrt(running_var + eps))

    var is the mean of x^2, averaged over the last `buffer_size` batches; the backward averages its statistic likewise.
    The first max(buffer_size, warmup) batches are normalized each by itself, and the ratio is 1 for the first 1000.
    The weights before the layer should be centred instead of x.

    Args: BatchNorm's, and
        buffer_size: batches that are averaged over.
        warmup: batches before that begins.
    """

    running_var: Tensor
    recent_var: Tensor
    recent_gradient: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.02,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        buffer_size: int = 16,
        warmup: int = 100,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        super().__init__(num_features, eps, affine, activation, device, dtype, negative_slope)
        if buffer_size < 1:
            raise ArgumentError(f"buffer_size must be at least 1 batch; got {buffer_size}.")
        if warmup < 0:
            raise ArgumentError(f"warmup must be a number of batches, 0 or more; got {warmup}.")
        self.buffer_size, self.warmup = buffer_size, warmup
        shapes: dict[str, tuple[int, ...]] = {
            "running_var": (num_features,),
            "recent_var": (buffer_size, num_features),
            "recent_gradient": (buffer_size, num_features),
        }
        self._track(momentum, track_running_stats, shapes, device, dtype)
        self._passed: deque[_Passed] = deque(maxlen=buffer_size)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Set the running variance to one, and forget all batches."""
        super().reset_running_stats()
        self._passed.clear()

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Normalize, with the last batches' mean squares in training and the running one in evaluation."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        self._check(input, OVER if self._uses_batch() else None, residual)
        recipe = Recipe(OVER, self.eps, self._fused, False, (1, self.num_features, 1, 1))
        tensors = {"weight": self.weight, "bias": self.bias, "residual": residual}
        if not self._uses_batch():
            stored = Moments(torch.zeros_like(self.running_var), self.running_var, 1)
            return select.normalize_stored(input, recipe, stored, **tensors)
        if not (self.training and self.track_running_stats):
            return select.normalized(input, recipe, **tensors)
        square = select.moments(input.detach(), OVER, centred=False).var.reshape(1, -1, 1, 1)
        used = self._statistics(square)
        return select.normalize_moving(input, recipe, used, self.recent_gradient, **tensors)

    def _statistics(self, square: Tensor) -> Statistics:
        """What to normalize a batch of this mean square with; written down, unless it has been before."""
        if is_recomputing():
            for passed in reversed(self._passed):
                if torch.equal(passed.square, square):
                    return passed.used
        used, recent = self._next(square)
        if self._writes():
            self._write_(used, recent)
            if not torch.compiler.is_compiling() and not is_transformed(square):
                self._passed.append(_Passed(square, used))
        return used

    def _next(self, square: Tensor) -> tuple[Statistics, Tensor]:
        """The statistics for the next batch, and the ring with it."""
        assert self.num_batches_tracked is not None
        seen = self.num_batches_tracked
        places = torch.arange(self.buffer_size, device=seen.device)
        here = (places == seen % self.buffer_size)[:, None]
        recent = torch.where(here, square.flatten(), self.recent_var.to(square.dtype))
        exact = seen < max(self.buffer_size, self.warmup)
        var = torch.where(exact, square, recent.mean(0).reshape(square.shape))
        running = self.running_var.to(square.dtype).reshape(square.shape)
        ratio = ((var + self.eps) / (running + self.eps)).sqrt().clamp(1 / RATIO_MAX, RATIO_MAX)
        ratio = torch.where(seen < max(RATIO_FROM, self.warmup), torch.ones_like(ratio), ratio)
        return Statistics(var, ratio, exact, here), recent

    @torch.no_grad()
    def _write_(self, used: Statistics, recent: Tensor) -> None:
        assert self.num_batches_tracked is not None
        seen, var = self.num_batches_tracked, used.var.flatten()
        factor = average_factor(Moments(self.running_var, self.running_var, seen), self.momentum)
        running = moved(self.running_var.to(var.dtype), var, factor)
        self.running_var.copy_(torch.where(seen == 0, var, running))
        self.recent_var.copy_(recent)
        seen.copy_(seen + 1)

    def extra_repr(self) -> str:
        """A BatchNorm's line, and how many batches."""
        return super().extra_repr() + f", buffer_size={self.buffer_size}, warmup={self.warmup}"
