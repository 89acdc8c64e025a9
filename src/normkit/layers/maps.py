"""Layer and root mean square normalization of maps, (N, C, H, W): over the channels of each position."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional import within as functional
from normkit.layers.affine_parts import Affine, check_affine, keep_parts_, reset_parts_
from normkit.layers.norm_layer import NormLayer


class LayerNorm2d(NormLayer, nn.LayerNorm):
    """Layer normalization of the channels of each position of (N, C, H, W), as ConvNeXt and SAM have it.

    Args:
        num_channels: channels of the input, C of (N, C, H, W).
        eps: added to the variance.
        affine: gamma and beta per channel (True), neither (False), or one of them ("scale", "shift").
        bias: False is another spelling of affine="scale".
        device: where the parameters live.
        dtype: the parameters' type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(LN(x) + r). The output has its channels side by side
        (channels_last), whatever the memory format of x.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: Affine = True,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(eps, None, activation)
        parts = check_affine(affine, bias)
        size = checks.channels(num_channels, type(self).__name__)
        super().__init__(size, eps, bool(affine), device=device, dtype=dtype)
        keep_parts_(self, affine, *parts)
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        """Set gamma to one and beta to zero, where they are."""
        reset_parts_(self)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Normalize the channels of each position."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        terms = self.eps, self._fused, residual, True
        return functional.normalize_channels(input, _channels_of(self), self.weight, self.bias, *terms, _who(self))

    def extra_repr(self) -> str:
        """Channels, eps, gamma and beta, and the activation."""
        return _shown(self, f"affine={self.affine}")


class RMSNorm2d(NormLayer, nn.RMSNorm):
    """Root mean square normalization of the channels of each position of (N, C, H, W): timm's RmsNorm2d.

    Args:
        num_channels: channels of the input, C of (N, C, H, W).
        eps: added to the mean square; None is torch's choice, the machine epsilon (float32's for half precision).
        affine: gamma per channel. There is no beta.
        device: where the parameter lives.
        dtype: the parameter's type.
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), or layer(x, residual=r) for activation(RMS(x) + r). The output has its channels side by side
        (channels_last), whatever the memory format of x.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float | None = 1e-6,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(1.0 if eps is None else eps, None, activation)
        super().__init__(checks.channels(num_channels, type(self).__name__), eps, affine, device, dtype)
        self._set_activation(activation, negative_slope)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Scale the channels of each position by their root mean square."""
        return self._run(input, residual)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        terms = functional.rms_eps(input, self.eps), self._fused, residual, False
        return functional.normalize_channels(input, _channels_of(self), self.weight, None, *terms, _who(self))

    def extra_repr(self) -> str:
        """Channels, eps, gamma, and the activation."""
        return _shown(self, f"affine={self.elementwise_affine}")


def _channels_of(layer: LayerNorm2d | RMSNorm2d) -> int:
    return layer.normalized_shape[0]


def _who(layer: LayerNorm2d | RMSNorm2d) -> str:
    return f"{type(layer).__name__}({_channels_of(layer)})"


def _shown(layer: LayerNorm2d | RMSNorm2d, affine: str) -> str:
    parts = [str(_channels_of(layer)), f"eps={layer.eps}", affine, layer._activation_repr()]
    return ", ".join(filter(None, parts))
