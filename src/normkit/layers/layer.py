"""Layer normalization (Ba, Kiros & Hinton 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.kernels import layer_calls
from normkit.layers.last_norm import LastNorm
from normkit.layers.norm_layer import ELSEWHERE


class LayerNorm(LastNorm, nn.LayerNorm, fast_path=True):
    """Layer normalization: mean and variance over the last dimensions of each example.

    Args:
        normalized_shape: sizes of the last dimensions, which share statistics; a number for the last alone.
        eps: added to the variance.
        elementwise_affine: gamma and beta, of shape normalized_shape.
        bias: False leaves out beta.
        device: where the parameters live.
        dtype: the parameters' type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(LN(x) + r); layer(x, add=h) for activation(LN(x + h)) and
        x + h. layer(x, weight=w, bias=b) takes gamma and beta from outside, in place of the layer's own: of shape
        normalized_shape, or with a first dimension of examples for each its own.
    """

    _torch = nn.LayerNorm

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(eps, None, activation)
        shape = checks.normalized_shape(normalized_shape, type(self).__name__)
        super().__init__(list(shape), eps, elementwise_affine, bias, device, dtype)
        self._set_activation(activation, negative_slope)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        own = self._parameters
        weight, bias = own.get("weight", ELSEWHERE), own.get("bias", ELSEWHERE)
        if weight is ELSEWHERE or bias is ELSEWHERE:
            return None
        return self._call(input, weight, bias)

    def _call(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        terms = self.normalized_shape, self.eps, self._fused, self.training
        return layer_calls.layer_norm(input, weight, bias, *terms)

    def _eps_for(self, input: Tensor) -> float:
        return self.eps
