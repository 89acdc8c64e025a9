"""Norms about zero, without a mean: RMSNorm (Zhang & Sennrich 2019) and ScaleNorm (Nguyen & Salazar 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional import within as functional
from normkit.kernels import layer_calls
from normkit.kernels.reference import Recipe, working_dtype
from normkit.layers.last_norm import LastNorm
from normkit.layers.norm_layer import ELSEWHERE, NormLayer


class RMSNorm(LastNorm, nn.RMSNorm, fast_path=True):
    """Root mean square normalization over the last dimensions of each example: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        normalized_shape: sizes of the last dimensions, which share statistics; a number for the last alone.
        eps: added to the mean square; None is torch's choice, the machine epsilon (float32's for half precision).
        elementwise_affine: gamma, of shape normalized_shape. There is no beta.
        device: where the parameter lives.
        dtype: the parameter's type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(RMS(x) + r); layer(x, add=h) for activation(RMS(x + h)) and
        x + h. layer(x, weight=w, bias=b) takes gamma and beta from outside, in place of the layer's own: of shape
        normalized_shape, or with a first dimension of examples for each its own.
    """

    _torch = nn.RMSNorm
    _centred = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(1.0 if eps is None else eps, None, activation)
        shape = checks.normalized_shape(normalized_shape, type(self).__name__)
        super().__init__(list(shape), eps, elementwise_affine, device, dtype)
        self._set_activation(activation, negative_slope)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        weight = self._parameters.get("weight", ELSEWHERE)
        return None if weight is ELSEWHERE else self._call(input, weight, None)

    def _call(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        return layer_calls.rms_norm(input, weight, bias, self.normalized_shape, self._eps_for(input), self._fused)

    def _eps_for(self, input: Tensor) -> float:
        return functional.rms_eps(input, self.eps)

    def _is_torchs(self, **extras: Any) -> bool:
        # Of torch's two ways to ONNX, the one that traces does not know its own operator.
        is_tracing = torch._C._get_tracing_state() is not None
        return super()._is_torchs(**extras) and not (is_tracing and torch.onnx.is_in_onnx_export())


class ScaleNorm(NormLayer):
    """Give every vector, the last dimension, one learned length: weight * x / ||x||.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
        device: where the parameter lives.
        dtype: the parameter's type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(SN(x) + r).
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        device: Any = None,
        dtype: Any = None,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(eps, None, activation)
        (dim,) = checks.normalized_shape(dim, type(self).__name__)
        super().__init__()
        self.dim, self.eps = dim, eps
        self._set_activation(activation, negative_slope)
        self.weight = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the length to sqrt(dim), that of a vector whose elements have variance one."""
        nn.init.constant_(self.weight, sqrt(self.dim))

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Give each vector of the last dimension the learned length."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        # ||x|| is sqrt(dim) times the root mean square. In the working type, or the quotient would round on its own.
        weight = (self.weight.to(working_dtype(input)) / sqrt(self.dim)).expand(self.dim)
        recipe = Recipe(functional.last(input, (self.dim,)), self.eps, self._fused, centred=False)
        who = f"{type(self).__name__}({self.dim})"
        return functional.normalize_last(input, (self.dim,), weight, None, recipe, residual, who=who)

    def extra_repr(self) -> str:
        """Size, eps and activation."""
        return ", ".join(filter(None, [f"{self.dim}, eps={self.eps}", super().extra_repr()]))
