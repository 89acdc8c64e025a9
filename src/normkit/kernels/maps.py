"""Norms of the channels at each position of maps, made of what `select` has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.kernels import native
from normkit.kernels.reference import Recipe
from normkit.kernels.select import normalized, requested_eagerly
from normkit.tracing import is_plain


def normalized_channels(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """As `normalized`, of the channels at each position of x, (N, C, ...), which lie side by side in what it returns.

    To go over positions that lie side by side takes less time, but the convolutions that read the result take more:
    a training step of ConvNeXt half as long again.
    """
    recipe = recipe._replace(over=(x.dim() - 1,))
    moved = None if residual is None else residual.movedim(1, -1)
    rows = as_rows(x.movedim(1, -1)).contiguous()  # of a part of larger maps, too
    return normalized(rows, recipe, weight=weight, bias=bias, residual=moved).movedim(x.dim() - 1, 1)


def as_rows(x: Tensor) -> Tensor:
    """The same, as rows that lie side by side where x has the channels of contiguous maps as its last dimension.

    Torch's layer norm returns such rows, too, and what comes next, most often a Linear, reads them.
    """
    if x.dim() < 3 or x.is_contiguous() or not x.movedim(-1, 1).is_contiguous():
        return x
    by_loops = native.may_turn(x) and is_plain(x) and requested_eagerly() not in ("torch", "reference")
    return _apply(x) if by_loops else x.contiguous()


class _AsRows(torch.autograd.Function):
    """As `contiguous`, by the loops; a gradient is what it is in either layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the rows."""
        return native.copied(x, torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient."""
        return grads[0]


_apply = super(torch.autograd.Function, _AsRows).apply  # see `autograd.apply`
