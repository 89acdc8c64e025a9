"""The only place that chooses how something is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.context import is_exporting
from normkit.kernels.reference import Recipe
from normkit.moments import Moments


def normalize(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalise x with its own moments over the dimensions `recipe.over`; the moments come back detached."""
    if mask is not None:
        # Padding may hold anything; but no gradient of zero removes a NaN from a sum.
        x = torch.where(mask | x.isfinite(), x, 0)
    if torch.compiler.is_compiling() or is_exporting():
        # The compiler derives and fuses the backward itself, from operators that it can see through; so must exporters.
        y, m = reference.normalize(x, weight, bias, residual, mask, recipe)
        return y, m._replace(mean=m.mean.detach(), var=m.var.detach())
    y, mean, var = reference.Normalize.apply(x, weight, bias, residual, mask, recipe)
    return y, Moments(mean, var, reference.count_values(x, recipe.over, mask))
