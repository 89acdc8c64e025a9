"""Switchable normalization (Luo et al. 2019): the layer learns whose statistics to use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.activations import ActivationName
from normkit.affine import scale_shift
from normkit.kernels import reference
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
        activation: ActivationName | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, activation, device, dtype)
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
        return self._run(input, residual=residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        self._check(input, (0, 2, 3) if self._uses_batch() else None, residual)
        wide = input.to(reference.working_dtype(input))
        instance = reference.moments(wide, (2, 3))
        kinds = [instance, _pooled(instance, 1), self._batch(instance)]
        mixed = Moments(
            _mixed(self.mean_weight, [m.mean for m in kinds]), _mixed(self.var_weight, [m.var for m in kinds]), 1
        )
        scale, _ = scale_shift(mixed, None, None, self.eps)
        return self._finish((wide - mixed.mean) * scale, input, residual)

    def _batch(self, instance: Moments) -> Moments:
        if not self._uses_batch():
            shape, wide = (1, self.num_features, 1, 1), instance.mean.dtype
            return Moments(self.running_mean.reshape(shape).to(wide), self.running_var.reshape(shape).to(wide), 1)
        batch = _pooled(instance, 0)
        if self._writes():
            mean, var = batch.mean.detach(), unbiased_var(batch).detach()
            self._update_(running_mean=mean.flatten(), running_var=var.flatten())
        return batch


def _pooled(instance: Moments, over: int) -> Moments:
    """The moments over one dimension more: all instances are of the same size, so that plain averages do."""
    mean = instance.mean.mean(over, keepdim=True)
    var = (instance.var + (instance.mean - mean).square()).mean(over, keepdim=True)
    return Moments(mean, var, instance.count * instance.mean.shape[over])


def _mixed(weight: Tensor, statistics: list[Tensor]) -> Tensor:
    shares = torch.softmax(weight.to(statistics[0].dtype), 0)
    first, second, third = (share * s for share, s in zip(shares.unbind(), statistics, strict=True))
    return first + second + third
