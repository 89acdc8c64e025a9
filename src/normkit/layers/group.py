"""Group normalization (Wu & He 2018)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional import within as functional
from normkit.kernels import layer_calls
from normkit.layers.affine_parts import Affine, check_affine, keep_parts_, reset_parts_
from normkit.layers.norm_layer import ELSEWHERE, NormLayer


class GroupNorm(NormLayer, nn.GroupNorm, fast_path=True):
    """Group normalization: mean and variance over the positions of each group of channels of each example.

    Args:
        num_groups: groups that the channels are divided into; must divide num_channels.
        num_channels: channels of the input, C of (N, C, ...).
        eps: added to the variance.
        affine: gamma and beta per channel (True), neither (False), or one of them ("scale", "shift").
        device: where the parameters live.
        dtype: the parameters' type.
        bias: False is another spelling of affine="scale".
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), layer(x, residual=r) for activation(GN(x) + r), layer(x, mask=m) for statistics over those positions
        only where m, of shape (N, ...) without the channels, is true. layer(x, weight=w, bias=b) takes gamma and beta
        from outside, in place of the layer's own: (C,), or (N, C) for each example its own.
    """

    _torch = nn.GroupNorm
    _takes_mask = True

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: Affine = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(eps, None, activation)
        checks.groups(num_groups, num_channels, type(self).__name__)
        parts = check_affine(affine, bias)
        super().__init__(num_groups, num_channels, eps, bool(affine), device, dtype)
        keep_parts_(self, affine, *parts)
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        """Set gamma to one and beta to zero, where they are."""
        reset_parts_(self)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalize each group of channels of each example."""
        return self._run(input, residual, mask, weight, bias)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        own = self._parameters
        weight, bias = own.get("weight", ELSEWHERE), own.get("bias", ELSEWHERE)
        if weight is ELSEWHERE or bias is ELSEWHERE:
            return None
        terms = self.num_groups, self.num_channels, self.eps, self._fused
        return layer_calls.group_norm(input, weight, bias, *terms)

    def _compute(  # type: ignore[override]
        self,
        input: Tensor,
        *,
        residual: Tensor | None,
        mask: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        who = f"{type(self).__name__}({self.num_groups}, {self.num_channels})"
        checks.batch_input(input, who, (self.num_channels,), (max(2, input.dim()),))
        weight, bias = self.weight if weight is None else weight, self.bias if bias is None else bias
        terms = weight, bias, self.eps, self._fused, residual, mask, who
        return functional.normalize_groups(input, self.num_groups, *terms)[0]
