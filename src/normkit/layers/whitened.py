"""Whitening across examples: decorrelated batch normalization (Huang et al. 2018) and IterNorm (Huang et al. 2019)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.errors import ArgumentError
from normkit.kernels import reference, select, whitening
from normkit.layers.affine_parts import Affine
from normkit.layers.channel_norm import ChannelNorm

Method = Literal["newton", "zca"]


class WhitenedBatchNorm(ChannelNorm):
    """What the whitening norms share: channels leave with unit variance, and uncorrelated.

        xhat = W (x - mean),  W = (cov + eps * I)^(-1/2)

    per group of channels, W symmetric, so that a channel stays as close to itself as whitening allows.

    Args: BatchNorm's, and
        method: "newton" approximates W by iteration (IterNorm); "zca" is exact, by eigendecomposition.
        group_size: channels that are whitened together; None takes all of them. Must divide num_features.
        iterations: of the "newton" method.
    """

    running_mean: Tensor
    running_whitener: Tensor

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
        method: Method = "newton",
        group_size: int | None = None,
        iterations: int = 5,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        super().__init__(num_features, eps, affine, activation, device, dtype, negative_slope)
        if method not in get_args(Method):
            raise ArgumentError(f'method must be "newton" or "zca"; got {method!r}.')
        if iterations < 1:
            raise ArgumentError(f"iterations must be at least 1; got {iterations}. The paper's number is 5.")
        size = num_features if group_size is None else group_size
        checks.groups(size, num_features, type(self).__name__, "group_size")
        self.method, self.group_size, self.iterations = method, size, iterations
        groups = num_features // size
        shapes: dict[str, tuple[int, ...]] = {
            "running_mean": (num_features,),
            "running_whitener": (groups, size, size),
        }
        self._track(momentum, track_running_stats, shapes, device, dtype)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Set the running mean to zero and the running whitening matrix to the identity."""
        super().reset_running_stats()
        if self.num_batches_tracked is not None:
            self.running_whitener.diagonal(dim1=-2, dim2=-1).fill_(1)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Whiten, with the batch's statistics in training and the stored ones in evaluation."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        over = (0, *range(2, input.dim()))
        select.leave_to_reference(type(self).__name__)
        self._check(input, over if self._uses_batch() else None, residual)
        wide = input.to(reference.working_dtype(input))
        if self._uses_batch():
            mean = reference.moments(wide, over).mean
            centred = self._grouped(wide - mean)
            whitener = self._whitener(centred)
            if self._writes():
                self._update_(running_mean=mean.detach().flatten(), running_whitener=whitener.detach())
        else:
            centred = self._grouped(wide - self._view(self.running_mean, input))
            whitener = self.running_whitener.to(wide.dtype)
        xhat = (whitener @ centred).reshape(input.transpose(0, 1).shape).transpose(0, 1)
        z = _laid_out_as(input, xhat)
        if self.weight is not None:
            z = z * self._view(self.weight, input)
        bias = None if self.bias is None else self._view(self.bias, input)
        return reference.finish(z, bias, residual, self._fused).to(input.dtype)

    @staticmethod
    def _view(per_channel: Tensor, input: Tensor) -> Tensor:
        return per_channel.reshape(1, -1, *[1] * (input.dim() - 2))

    def _grouped(self, x: Tensor) -> Tensor:
        """(N, C, ...) as (groups, channels of a group, values)."""
        return x.transpose(0, 1).reshape(self.num_features // self.group_size, self.group_size, -1)

    def _whitener(self, centred: Tensor) -> Tensor:
        eye = torch.eye(self.group_size, dtype=centred.dtype, device=centred.device)
        sigma = centred @ centred.transpose(1, 2) / centred.shape[-1] + self.eps * eye
        return whitening.zca(sigma, self.eps) if self.method == "zca" else whitening.newton(sigma, self.iterations)

    def extra_repr(self) -> str:
        """A BatchNorm's line, the method and the groups."""
        method = f"iterations={self.iterations}" if self.method == "newton" else "method=zca"
        return super().extra_repr() + f", {method}, group_size={self.group_size}"


def _laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """Return y in the memory format of x; the products have left it in that of neither."""
    if x.dim() > 2 and x.stride(1) < x.stride(-1):
        return y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y.contiguous()


class WhitenedBatchNorm1d(WhitenedBatchNorm):
    """Whitening of (N, C) or (N, C, L)."""

    _ranks = (2, 3)


class WhitenedBatchNorm2d(WhitenedBatchNorm):
    """Whitening of (N, C, H, W)."""

    _ranks = (4,)
