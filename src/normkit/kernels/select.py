"""The only place that chooses how something is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.moments import Moments


def normalize(
    x: Tensor,
    *,
    over: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Moments]:
    """Normalise x with its own moments over the dimensions `over`; the moments come back detached."""
    arguments = (x, weight, bias, residual, mask, over, eps, activation)
    if torch.compiler.is_compiling():
        # The compiler derives and fuses the backward itself, from operators that it can see through.
        y, m = reference.normalize(*arguments)
        return y, m._replace(mean=m.mean.detach(), var=m.var.detach())
    y, mean, var = reference.Normalize.apply(*arguments)
    return y, Moments(mean, var, reference.count_values(x, over, mask))
