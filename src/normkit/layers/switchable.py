"""Switchable normalization (Luo et al. 2019): the layer learns whose statistics to use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.kernels import select
from normkit.kernels.reference import Recipe
from normkit.layers.affine_parts import Affine
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments, unbiased_var


class SwitchableNorm2d(ChannelNorm):
    """A learned mix of instance, layer and batch statistics, of (N, C, H, W).

        y = (x - mean) / sqrt(var + eps) * weight + bias

    mean and var are averages of the three kinds', in that order, weighted by softmax(mean_weight) and
    softmax(var_weight).

    Args: BatchNorm's; the running statistics are those of the batch part.
    """

    running_mean: Tensor
    running_var: Tensor

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
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        super().__init__(num_features, eps, affine, activation, device, dtype, negative_slope)
        self.mean_weight = self._parameter((3,), device, dtype)
        self.var_weight = self._parameter((3,), device, dtype)
        shapes: dict[str, tuple[int, ...]] = {"running_mean": (num_features,), "running_var": (num_features,)}
        self._track(momentum, track_running_stats, shapes, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Mix all three alike, set gamma to one and beta to zero, and forget the running statistics."""
        super().reset_parameters()
        nn.init.ones_(self.mean_weight)
        nn.init.ones_(self.var_weight)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Normalize; in evaluation the batch's part comes from the running statistics."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        uses_batch = self._uses_batch()
        self._check(input, (0, 2, 3) if uses_batch else None, residual)
        stored = None if uses_batch else Moments(self.running_mean, self.running_var, 1)
        y, instance, _ = select.normalize_mixed(
            input,
            Recipe((2, 3), self.eps, self._fused, True, (1, self.num_features, 1, 1)),
            partial(_mixed, stored),
            (self.mean_weight, self.var_weight),
            weight=self.weight,
            bias=self.bias,
            residual=residual,
        )
        if uses_batch and self._writes():
            batch = instance.pooled(0)
            self._update_(running_mean=batch.mean, running_var=unbiased_var(batch))
        return y


def _mixed(stored: Moments | None, instance: Moments, mean_weight: Tensor, var_weight: Tensor) -> Moments:
    """The mix for moments of the instances, (N, C); its batch part is stored, or pooled over the examples."""
    kinds = [instance, instance.pooled(1, keepdim=True), instance.pooled(0) if stored is None else stored]
    return Moments(_averaged(mean_weight, [m.mean for m in kinds]), _averaged(var_weight, [m.var for m in kinds]), 1)


def _averaged(weight: Tensor, kinds: list[Tensor]) -> Tensor:
    wide = kinds[0].dtype
    shares = torch.softmax(weight.to(wide), 0).unbind()
    first, second, third = (share * t.to(wide) for share, t in zip(shares, kinds, strict=True))
    return first + second + third
