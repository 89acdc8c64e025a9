"""Convolution with scaled weight standardization (Brock et al. 2021)."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from normkit import checks
from normkit.activations import ActivationName, check_activation
from normkit.errors import ArgumentError
from normkit.kernels import select
from normkit.kernels.reference import moments
from normkit.layers.norm_layer import _as_leaf
from normkit.layers.refusals import Unscriptable

ACTIVATION_GAINS: dict[str | None, float] = {
    None: 1.0,
    "relu": 1.7139588594436646,
    "leaky_relu": 1.70590341091156,
    "silu": 1.7881293296813965,
    "gelu": 1.7015043497085571,
    "sigmoid": 4.803835391998291,
    "tanh": 1.5939117670059204,
}
"""1 / std(activation(z)) for z of a standard normal distribution, as in the authors' code (their estimates)."""


class ScaledStdConv2d(Unscriptable, nn.Conv2d):
    """A convolution whose kernels have mean zero and a fixed length, so that it keeps the variance of its input.

    weight' = activation_gain * gain * (weight - mean) / sqrt(max(var * fan_in, eps)), with mean and biased variance
    over the fan_in values of each output channel.

    Args:
        in_channels: as in torch's layer, like all up to dtype.
        out_channels: channels of the output.
        kernel_size: size of the kernel.
        stride: step of the kernel.
        padding: added to the sides of the input.
        dilation: distance between the kernel's points.
        groups: parts of the channels that are convolved apart.
        bias: whether to add one.
        padding_mode: what the padding holds.
        device: where the parameters live.
        dtype: the parameters' type.
        activation_gain: a number, or the name of the activation that the input has come through.
        eps: the smallest var * fan_in to divide by.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        activation_gain: float | ActivationName | None = 1.0,
        eps: float = 1e-4,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        if not eps > 0:
            raise ArgumentError(f"eps must be positive, it keeps the division finite; got {eps}. Usual: 1e-4.")
        if self.weight[0].numel() == 1:
            raise ArgumentError(
                f"ScaledStdConv2d needs more than 1 weight per output channel, or they are all zero once their mean is "
                f"gone; got {in_channels} input channels in {groups} groups and a kernel of {self.kernel_size}. "
                "Use nn.Conv2d there, or fewer groups."
            )
        self.activation_gain = _gain(activation_gain)
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(out_channels, 1, 1, 1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw weight and bias as torch does, and set the gain to one."""
        super().reset_parameters()
        if hasattr(self, "gain"):  # not yet, when torch's constructor calls
            nn.init.ones_(self.gain)

    def standardized_weight(self) -> Tensor:
        """Return the weight that convolves: computed in at least float32, rounded once."""
        return self._standardized(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the standardized weight, in the input's type."""
        if isinstance(input, fx.Proxy):
            return cast(Tensor, _as_leaf(self, input))
        select.leave_to_reference(type(self).__name__)
        checks.floating(input, type(self).__name__)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return cast(Tensor, self._conv_forward(input, self._standardized(input.dtype), bias))

    def _standardized(self, dtype: torch.dtype) -> Tensor:
        m = moments(self.weight, (1, 2, 3))
        scale = (m.var * m.count).clamp(min=self.eps).rsqrt() * self.activation_gain
        return ((self.weight - m.mean) * (scale * self.gain)).to(dtype)

    def extra_repr(self) -> str:
        """Torch's line, and what is set beyond it."""
        gain = "" if self.activation_gain == 1 else f", activation_gain={self.activation_gain:.6g}"
        return f"{super().extra_repr()}{gain}, eps={self.eps:g}"


def _gain(value: float | str | None) -> float:
    if value is None or isinstance(value, str):
        check_activation(value)
        return ACTIVATION_GAINS[value]
    if not (value > 0 and isfinite(value)):
        raise ArgumentError(
            f'activation_gain must be a positive number, or an activation\'s name such as "relu"; got {value}.'
        )
    return float(value)
