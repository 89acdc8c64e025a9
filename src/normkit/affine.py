"""The one home of gamma / sqrt(var + eps)."""

from torch import Tensor

from normkit.moments import Moments


def scale_shift(moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the (scale, shift) for which `x * scale + shift` normalizes x with these moments.

    scale = weight / sqrt(var + eps),  shift = bias - mean * scale
    """
    scale = (moments.var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -moments.mean * scale
    return scale, shift if bias is None else shift + bias
