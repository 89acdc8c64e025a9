"""Norms of the channels at each position of maps, made of what `select` has."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from normkit.kernels.reference import Recipe
from normkit.kernels.select import normalize, normalize_stored, normalized, plan_for, stays_whole
from normkit.moments import Moments


def normalized_channels(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """As `normalized`, of the channels at each position of x, (N, C, ...), which lie side by side or positions do.

    Channels side by side are the rows of a norm over the last dimension. Positions side by side have their statistics
    in the loops as a batch in chunks has its: an example is a chunk, of as many rows as it has channels. Gamma and
    beta, one for each such row, then take a second pass, which is a batch norm's evaluation with mean 0 and variance 1:
    reading two tensors and writing two, where rows made by a copy and copied back would be three of each.
    """
    flat, beside = x.flatten(2), None if residual is None else residual.flatten(2)
    bare = recipe._replace(activation=None)
    if x.movedim(1, -1).is_contiguous() or not _runs_in_loops(flat, bare):
        rows = recipe._replace(over=(x.dim() - 1,))
        moved = None if residual is None else residual.movedim(1, -1)
        return normalized(x.movedim(1, -1), rows, weight=weight, bias=bias, residual=moved).movedim(x.dim() - 1, 1)
    if weight is None and bias is None and _runs_in_loops(flat, recipe, beside):
        y = normalize(flat, recipe, residual=beside)[0]
    else:
        y = restored(normalize(flat, bare)[0], recipe.activation, weight, bias, beside)
    return cast(Tensor, y.unflatten(2, x.shape[2:]))


def _runs_in_loops(x: Tensor, recipe: Recipe, residual: Tensor | None = None) -> bool:
    """Whether the loops compute a call, now or when the graph that is being recorded runs."""
    return plan_for(x, recipe, residual=residual) is not None or stays_whole(x, recipe, None, None, residual)


def restored(
    x: Tensor, activation: str | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """Return activation(x * weight + bias + residual), with one weight and bias per channel of x, (N, C, ...)."""
    channels, rank = x.shape[1], x.dim()
    neutral = Moments(x.new_zeros(channels, dtype=torch.float32), x.new_ones(channels, dtype=torch.float32), 0)
    recipe = Recipe((0, *range(2, rank)), 0.0, activation, True, (1, channels, *(1,) * (rank - 2)))
    return normalize_stored(x, recipe, neutral, weight, bias, residual)
