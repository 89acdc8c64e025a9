"""Normalization with statistics that a few operators make of those of x: merged with others', or mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.kernels import autograd, halves, native, reference
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

# The statistics to normalize with, from those of x, without the dimensions they are over, and from parameters of the
# mix. Called again for second derivatives, so it must not write anything.
Mix = Callable[..., Moments]


class Mixed(NamedTuple):
    """What comes of a call: the output, the moments of x, and what was made of them, both detached."""

    y: Tensor
    own: Moments
    used: Moments

    @staticmethod
    def of(y: Tensor, own: Moments, used: Moments) -> Mixed:
        """The result with its moments detached."""
        return Mixed(y, own.detach(), used.detach())


def by_loops(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    plan: Plan,
    mix: Mix,
    parameters: Sequence[Tensor] = (),
) -> Mixed:
    """Run the loops; padding must be finite."""
    seam = _Seam(plan, mix, mask)
    y = halves.normalize(x, weight, bias, residual, plan, seam, mask, parameters)
    return Mixed.of(y, seam.own, seam.used)


def merged_by_loops(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, plan: Plan, others: Moments
) -> Mixed:
    """As `by_loops`, where the mix is a merge with the moments of a known number of others: all is as if x had them."""
    assert isinstance(others.count, int)

    def again(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        return by_reference(x, weight, bias, residual, None, plan.recipe, others.merge, parameters).y

    theirs = torch.stack([others.mean, others.var]).to(torch.float64)
    merge = native.Merge(theirs, others.count, torch.empty_like(theirs))
    y, both = autograd.normalize_merged(x, weight, bias, residual, plan, merge, again)
    merged = plan.moments(both)._replace(count=plan.values + others.count)
    return Mixed(y, Moments(merge.own[0], merge.own[1], plan.values), merged)


def by_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    recipe: Recipe,
    mix: Mix,
    parameters: Sequence[Tensor],
) -> Mixed:
    """Compute as the reference does, in its type."""
    wide = x.to(reference.working_dtype(x))
    found = reference.moments(wide, recipe.over, mask, recipe.centred)
    own = reference.without(recipe.over, found)
    used = mix(own, *parameters)
    viewed = Moments(used.mean.reshape(found.mean.shape), used.var.reshape(found.mean.shape), 0)
    y = reference.normalize_with(wide, viewed, recipe.view(weight), recipe.view(bias), residual, recipe)
    return Mixed.of(y.to(x.dtype), own, used)


class _Seam:
    """The mix and, as a graph of its own, how it came about: backward, autograd goes through that."""

    own: Moments
    used: Moments

    def __init__(self, plan: Plan, mix: Mix, mask: Tensor | None) -> None:
        self._plan, self._mix, self._mask = plan, mix, mask

    def statistics(self, x: Tensor, parameters: Sequence[Tensor]) -> Moments:
        self.own = native.moments(x, self._plan, self._mask)
        with torch.enable_grad():
            self._leaves = [t.detach().requires_grad_() for t in (self.own.mean, self.own.var, *parameters)]
            mean, var, *rest = self._leaves
            self.used = self._mix(Moments(mean, var, self.own.count), *rest)
        return self.used.detach()

    def between(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        # With dmean and dvar the gradients of the moments of x, a value gets (dmean + 2 (x - mean) dvar) / n, which is
        # level + slope * (x - used.mean).
        own, used, recipe = self.own, self.used, self._plan.recipe
        inverse_var = (used.var.detach().double() + recipe.eps).reciprocal()
        inverse_std = inverse_var.sqrt()
        of_g, of_g_xhat = sums if weight is None else sums * weight.detach().reshape(-1)
        outputs, of_outputs = (used.mean, used.var), (-of_g * inverse_std, -0.5 * of_g_xhat * inverse_var)
        found = torch.autograd.grad(outputs, self._leaves, of_outputs, allow_unused=True, retain_graph=True)
        dmean, dvar, *rest = (torch.zeros_like(t) if d is None else d for d, t in zip(found, self._leaves, strict=True))
        n = own.count.clamp(min=1) if isinstance(own.count, Tensor) else own.count
        slope = 2 * dvar / n
        level = slope * (used.mean.detach() - own.mean)
        if recipe.centred:  # else the mean is zero whatever x is
            level = level + dmean / n
        return torch.stack([-level / inverse_std, -slope / inverse_var]), rest

    def again(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        recipe = self._plan.recipe
        return by_reference(x, weight, bias, residual, self._mask, recipe, self._mix, parameters).y
