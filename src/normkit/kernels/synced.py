"""Normalisation of a batch that is spread over processes: the reference with an exchange at each of its two seams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels.reference import Backward, Recipe, moments, normalize_with, working_dtype
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
        wide = x.to(working_dtype(x))
        m = gather(moments(wide, recipe.over, mask))
        y = normalize_with(wide, m, weight, bias, residual, recipe).to(x.dtype)
        count = torch.as_tensor(m.count, device=x.device)
        ctx.recipe, ctx.reduce = recipe, reduce
        ctx.save_for_backward(x, weight, bias, residual, mask, m.mean, m.var, count)
        ctx.mark_non_differentiable(m.mean, m.var, count)
        return y, m.mean, m.var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual; those of weight and bias are this process's share."""
        x, weight, bias, residual, mask, mean, var, count = ctx.saved_tensors
        recipe = ctx.recipe
        back = Backward.of(grads[0], x, weight, bias, residual, Moments(mean, var, count), recipe)
        of_g, of_g_xhat = ctx.reduce(torch.stack(back.sums(recipe.over)))
        dx = back.dx((of_g, of_g_xhat), count, mask, recipe.centred).to(x.dtype)
        dresidual = back.dz.to(grads[0].dtype) if ctx.needs_input_grad[3] else None
        return dx, back.dweight(weight), back.dbias(bias), dresidual, None, None, None, None
