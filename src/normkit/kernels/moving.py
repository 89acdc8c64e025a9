"""Normalization by moving averages (Yan et al. 2020): the backward's statistic is averaged over batches too.

What a backward computes goes into a ring of the last batches' values. Neither autograd nor the compiler provides for
a backward that keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from normkit.kernels import halves, reference
from normkit.kernels.plans import Plan
from normkit.moments import Moments
from normkit.tracing import is_exporting

OVER = (0, 2, 3)


class Statistics(NamedTuple):
    """What one batch is normalized with; tensors throughout, so that no step waits for a number to be read."""

    var: Tensor  # (1, C, 1, 1)
    ratio: Tensor  # (1, C, 1, 1), by which the output is corrected towards that of evaluation
    exact: Tensor  # (), true while the batch is normalized by itself
    here: Tensor  # (B, 1), true at the batch's place in the rings


def by_operators(x: Tensor, used: Statistics, ring: Tensor, eps: float) -> Tensor:
    """Return ratio * x / sqrt(var + eps); the backward writes into `ring`, (B, C), and averages over it."""
    if is_exporting():
        return scaled(x, used.var, used.ratio, eps)
    if torch.compiler.is_compiling():
        from normkit.kernels import compile_ops  # defines operators, which takes time that only this case should pay

        return cast(Tensor, compile_ops.moving_normalize(x, *used, ring, eps)[0])
    return cast(Tensor, Moving.apply(x, *used, ring, eps))


def by_loops(
    x: Tensor,
    used: Statistics,
    ring: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
) -> Tensor:
    """Return activation(`by_operators` * weight + bias + residual)."""
    ratio = used.ratio.flatten()
    weight = ratio if weight is None else weight * ratio
    return halves.normalize(x, weight, bias, residual, plan, _Seam(plan, used, ring))


class _Seam(NamedTuple):
    plan: Plan
    used: Statistics
    ring: Tensor

    def statistics(self, x: Tensor, parameters: Sequence[Tensor]) -> Moments:
        var = self.used.var.flatten()
        return Moments(torch.zeros_like(var), var, 0)

    def between(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        assert weight is not None
        product = sums[1] * weight.detach() / self.plan.values
        recent = torch.where(self.used.here, product, self.ring.to(product.dtype))
        self.ring.copy_(recent)
        return torch.stack([torch.zeros_like(product), chosen(self.used.exact, product, recent).flatten()]), ()

    def again(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        recipe, used = self.plan.recipe, self.used
        weight, bias = recipe.view(weight), recipe.view(bias)
        assert weight is not None  # with the ratio in it
        plain = used._replace(ratio=torch.ones_like(used.ratio))
        z = by_operators(x.to(reference.working_dtype(x)), plain, self.ring, recipe.eps) * weight
        return reference.finish(z, bias, residual, recipe.activation).to(x.dtype)


class Moving(torch.autograd.Function):
    """`by_operators` outside of compiled code, differentiable again as far as the formula itself is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, var: Tensor, ratio: Tensor, exact: Tensor, here: Tensor, ring: Tensor, eps: float) -> Tensor:
        """Compute."""
        return scaled(x, var, ratio, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the inputs; the ring by reference, because other backwards may write into it before this one."""
        *saved, ctx.ring, ctx.eps = inputs
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = (g - z * mean(g * z)) / sqrt(var + eps), with g = dy * ratio."""
        x, var, ratio, exact, here = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, the variance must be a function of x
            square = x.square().mean(OVER, keepdim=True)
            var = var + (square - square.detach()) * _own_share(exact, ctx.ring, var)
        std = (var + ctx.eps).sqrt()
        z, g = x / std, dy * ratio
        product = (g * z).mean(OVER)
        recent = torch.where(here, product, ctx.ring.to(product.dtype))
        with torch.no_grad():
            ctx.ring.copy_(recent)
        return (g - z * chosen(exact, product, recent)) / std, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        """The derivative of what was computed, in which this batch is one of those averaged over."""
        x, var, ratio, exact, _ = ctx.saved_tensors
        std = (var + ctx.eps).sqrt()
        z, dz = x / std, dx / std
        through = (z * dz).mean(OVER, keepdim=True) * _own_share(exact, ctx.ring, var)
        return cast(Tensor, (dz - z * through) * ratio)


def scaled(x: Tensor, var: Tensor, ratio: Tensor, eps: float) -> Tensor:
    """Return ratio * x / sqrt(var + eps)."""
    return x * (ratio / (var + eps).sqrt())


def chosen(exact: Tensor, product: Tensor, recent: Tensor) -> Tensor:
    """The batch's own mean(g * z), or that of the last batches: (C, 1, 1)."""
    return torch.where(exact, product, recent.mean(0))[:, None, None]


def _own_share(exact: Tensor, ring: Tensor, var: Tensor) -> Tensor:
    """The weight of this batch in its variance."""
    return torch.where(exact, torch.ones_like(var), 1 / ring.shape[0])
