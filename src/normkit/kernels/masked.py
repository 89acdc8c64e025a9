"""Normalization with statistics of some positions only, made of torch's operators: in few passes, on any device."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.reference import Recipe
from normkit.moments import Moments


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the type of the statistics of x, outside of the reference."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


class Statistics(NamedTuple):
    """Statistics about a shift, and how far each value is from it; dimensions that share them are kept."""

    from_shift: Tensor  # x - shift, where padding that is not finite counts as zero
    shift: Tensor  # a first estimate of the mean
    gap: Tensor  # from there to the mean
    var: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, of no use here

    @property
    def mean(self) -> Tensor:
        """The mean; an infinity makes the gap NaN, and is then what plain averaging gives."""
        return self.shift + self.gap.nan_to_num(nan=0.0)


def gather(x: Tensor, over: tuple[int, ...], mask: Tensor) -> Statistics:
    """Return the statistics of the positions where the mask is true."""
    wide = statistics_dtype(x)
    count = mask.sum(over, keepdim=True) * prod(x.shape[d] for d in over if mask.shape[d] == 1)
    n, total = count.clamp(min=1).to(wide), prod(x.shape[d] for d in over)
    shift = torch.where(mask, x, 0).sum(over, keepdim=True, dtype=wide) / n
    from_shift = _finite(x).sub(shift)
    # About the shift, zeros in place of padding change nothing but the number of values.
    var, mean = torch.var_mean(torch.where(mask, from_shift, 0), over, correction=0, keepdim=True)
    share = total / n
    gap = mean * share
    return Statistics(from_shift, shift, gap, ((var + mean.square()) * share - gap.square()).clamp(min=0), count)


def statistics(x: Tensor, over: tuple[int, ...], mask: Tensor) -> Moments:
    """Return the moments of the positions where the mask is true, without the dimensions `over`."""
    if prod(x.shape[d] for d in over) == 0:
        kept = [n for d, n in enumerate(x.shape) if d not in over]
        unknown = x.new_full(kept, torch.nan, dtype=statistics_dtype(x))
        return Moments(unknown, unknown, torch.zeros_like(unknown, dtype=torch.int64))
    found = gather(x, over, mask)
    mean = found.mean
    return Moments(mean.squeeze(over), found.var.squeeze(over), found.count.expand(mean.shape).squeeze(over))


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, recipe: Recipe
) -> tuple[Tensor, Moments]:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, of all positions, and the moments without their dimensions.

    Weight and bias broadcast against x. Padding may hold anything; where it is not finite, it counts as zero.
    """
    y, mean, var, count = Normalize.apply(x, weight, bias, mask, recipe)
    count = count.expand(mean.shape)
    return y, Moments(mean.squeeze(recipe.over), var.squeeze(recipe.over), count.squeeze(recipe.over))


class Normalize(torch.autograd.Function):
    """`normalize` with its analytic gradient: through autograd, every operator would keep and pass on a tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, recipe: Recipe
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and mean, variance and count."""
        found = gather(x, recipe.over, mask)
        inverse_std = (found.var + recipe.eps).rsqrt()
        scale = inverse_std if weight is None else inverse_std * weight
        start = -found.gap * scale
        y = torch.addcmul(start if bias is None else start + bias, found.from_shift, scale).to(x.dtype)
        mean = found.mean
        ctx.recipe = recipe
        ctx.save_for_backward(x, weight, bias, mask, found.shift, found.gap, inverse_std, found.count)
        ctx.mark_non_differentiable(mean, found.var, found.count)
        return y, mean, found.var, found.count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        x, weight, bias, mask, shift, gap, inverse_std, count = ctx.saved_tensors
        dy, recipe = grads[0], ctx.recipe._replace(activation=None)
        if torch.is_grad_enabled():  # to be differentiated again, everything must be a function of x
            clean = torch.where(mask | x.isfinite(), x, 0)
            dx, dweight, dbias, _ = reference.gradients(dy, clean, weight, bias, None, mask, recipe, False)
            return torch.where(mask | x.isfinite(), dx, 0), dweight, dbias, None, None
        over, wide = recipe.over, statistics_dtype(x)
        parameter = next((t.shape for t in (weight, bias) if t is not None), None)
        # First over what neither statistics nor parameters tell apart: the rest of all sums is then small.
        common = [d for d in over if parameter is None or parameter[d] == 1]
        finite = _finite(x)
        from_shift = finite.sub(shift)
        of_dz = dy.sum(common, keepdim=True, dtype=wide)
        of_dz_xhat = ((dy * from_shift).sum(common, keepdim=True) - gap * of_dz) * inverse_std
        of_g, of_g_xhat = ((t if weight is None else t * weight).sum(over, keepdim=True) for t in (of_dz, of_dz_xhat))
        n = count.clamp(min=1).to(wide)
        slope = inverse_std.square() * of_g_xhat / n
        through = torch.addcmul(gap * slope - inverse_std * of_g / n, from_shift, -slope)
        scale = inverse_std if weight is None else inverse_std * weight
        dx = torch.addcmul(torch.where(mask, through, 0), dy, scale)
        dx = torch.where(finite == x, dx, 0).to(x.dtype)
        dweight = None if weight is None else of_dz_xhat.sum_to_size(weight.shape).to(weight.dtype)
        dbias = None if bias is None else of_dz.sum_to_size(bias.shape).to(bias.dtype)
        return dx, dweight, dbias, None, None


def _finite(x: Tensor) -> Tensor:
    """Zero in place of what is not finite: where it counts, neither are the statistics, and all becomes NaN."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
