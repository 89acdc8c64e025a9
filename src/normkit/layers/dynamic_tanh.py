"""Functions of single values in the place of norms: DynamicTanh (Zhu et al. 2025) and Derf (Chen et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.errors import ArgumentError
from normkit.kernels import squash
from normkit.kernels.squash import Function
from normkit.layers.norm_layer import NormLayer


class Squashed(NormLayer):
    """What both share: a scale for all values, alpha, and gamma and beta like those of a layer norm."""

    _function: ClassVar[Function]

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        channels_last: bool,
        alpha_init_value: float,
        activation: ActivationLike | None,
        negative_slope: float,
        device: Any,
        dtype: Any,
    ) -> None:
        checks.options(1.0, None, activation)
        shape = checks.normalized_shape(normalized_shape, type(self).__name__)
        if not channels_last and len(shape) > 1:
            raise ArgumentError(
                f"{type(self).__name__} with channels_last=False has one gamma per channel of (N, C, ...); got "
                f"normalized_shape {shape}. Pass the number of channels alone."
            )
        _must_be_finite("alpha_init_value", alpha_init_value)
        super().__init__()
        self.normalized_shape, self.channels_last, self.alpha_init_value = shape, channels_last, alpha_init_value
        self._set_activation(activation, negative_slope)
        # One dimension, not none: FSDP cannot shard a parameter without any.
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set alpha to its first value, gamma to one and beta to zero."""
        nn.init.constant_(self.alpha, self.alpha_init_value)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Squash every value by itself."""
        return self._run(input, residual)

    def _shift(self) -> Tensor | None:
        return None

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        who, shape = f"{type(self).__name__}({', '.join(map(str, self.normalized_shape))})", self.normalized_shape
        if self.channels_last:
            checks.last_dimensions(input, who, shape)
        else:
            checks.batch_input(input, who, shape, (max(2, input.dim()),))
        checks.same_shape(residual, input, who)
        terms = self._function, self.alpha, self._shift(), self.weight, self.bias, self._fused
        return squash.squashed(input, *terms, residual, self.channels_last)

    def extra_repr(self) -> str:
        """The shape, where the channels are, the first values, and the activation."""
        shape = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        named = ("channels_last", "alpha_init_value", "shift_init_value")
        parts = [f"{name}={value}" for name in named if (value := vars(self).get(name)) is not None]
        return ", ".join(filter(None, [str(shape), *parts, super().extra_repr()]))


class DynamicTanh(Squashed):
    """The tanh of every value by itself, in the place of a layer norm: weight * tanh(alpha * x) + bias.

    Args:
        normalized_shape: sizes of the last dimensions, which have a gamma and beta for each element, or the number of
            channels.
        channels_last: whether the channels are the last dimension, (..., C); False: the second, (N, C, ...).
        alpha_init_value: the first alpha, one number for the layer, which is learned.
        device: where the parameters live.
        dtype: the parameters' type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(DyT(x) + r).
    """

    _function = "tanh"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        channels_last: bool = True,
        alpha_init_value: float = 0.5,
        *,
        device: Any = None,
        dtype: Any = None,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        terms = activation, negative_slope, device, dtype
        super().__init__(normalized_shape, channels_last, alpha_init_value, *terms)
        self.reset_parameters()


class Derf(Squashed):
    """The error function of every value by itself, in the place of a layer norm.

        weight * erf(alpha * x + shift) + bias

    Args:
        normalized_shape: sizes of the last dimensions, which have a gamma and beta for each element, or the number of
            channels.
        channels_last: whether the channels are the last dimension, (..., C); False: the second, (N, C, ...).
        alpha_init_value: the first alpha, one number for the layer, which is learned.
        shift_init_value: the first shift, likewise.
        device: where the parameters live.
        dtype: the parameters' type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(Derf(x) + r).
    """

    _function = "erf"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        channels_last: bool = True,
        alpha_init_value: float = 0.5,
        shift_init_value: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        _must_be_finite("shift_init_value", shift_init_value)
        terms = activation, negative_slope, device, dtype
        super().__init__(normalized_shape, channels_last, alpha_init_value, *terms)
        self.shift_init_value = shift_init_value
        self.shift = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha and shift to their first values, gamma to one and beta to zero."""
        super().reset_parameters()
        nn.init.constant_(self.shift, self.shift_init_value)

    def _shift(self) -> Tensor | None:
        return self.shift


def _must_be_finite(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not isfinite(value):
        raise ArgumentError(f"{name} must be a finite number; got {value!r}.")
