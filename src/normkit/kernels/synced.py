"""Normalization of a batch that is spread over processes: an exchange at each of its two seams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import select
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

Gather = Callable[[Moments], Moments]  # this process's moments -> those of all
Reduce = Callable[[Tensor], Tensor]  # this process's sums -> those of all


class SyncedNormalize(torch.autograd.Function):
    """As `reference.Normalize`, with moments gathered over processes forward, and their gradient's sums backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        recipe: Recipe,
        gather: Gather,
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and mean, variance and count over all processes."""
        m = gather(select.moments(x, recipe.over, mask))
        y = select.normalize_stored(x, recipe, m, weight, bias, residual)
        count = torch.as_tensor(m.count, device=x.device)
        ctx.recipe, ctx.reduce = recipe, reduce
        signed = (residual, y) if residual is not None and recipe.activation is not None else (None, None)
        ctx.save_for_backward(x, weight, bias, mask, m.mean, m.var, count, *signed)
        ctx.mark_non_differentiable(m.mean, m.var, count)
        return y, m.mean, m.var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual; those of weight and bias are this process's share."""
        x, weight, bias, mask, mean, var, count, residual, y = ctx.saved_tensors
        halves = select.GradientHalves(ctx.recipe, x, weight, bias, residual, y, mask, Moments(mean, var, count))
        own = halves.sums(grads[0])
        everyones = ctx.reduce(own.clone())
        dx, dresidual = halves.spread(grads[0], everyones, ctx.needs_input_grad[3])
        of_dz, of_dz_xhat = own
        dweight = None if weight is None else of_dz_xhat.to(weight.dtype)
        dbias = None if bias is None else of_dz.to(bias.dtype)
        return dx, dweight, dbias, dresidual, None, None, None, None
