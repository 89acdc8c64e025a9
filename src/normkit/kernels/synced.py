"""Normalization of a batch that is spread over processes: an exchange at each of its two seams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import native, reference, select
from normkit.kernels.fused_halves import FusedHalves
from normkit.kernels.plans import Plan
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
        ctx.backend = select.requested()  # a backward may run in another thread, which asks for nothing
        signed = (residual, y) if residual is not None and recipe.activation is not None else (None, None)
        ctx.save_for_backward(x, weight, bias, mask, m.mean, m.var, count, *signed)
        ctx.mark_non_differentiable(m.mean, m.var, count)
        return y, m.mean, m.var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual; those of weight and bias are this process's share."""
        x, weight, bias, mask, mean, var, count, residual, y = ctx.saved_tensors
        halves = GradientHalves(ctx.recipe, x, weight, bias, residual, y, mask, Moments(mean, var, count))
        with select.backend(ctx.backend):
            if halves.runs_on_torch():
                fused = FusedHalves.of(grads[0], x, weight, bias, residual, halves.moments, ctx.recipe)
                own = fused.sums()
                dx, dresidual = (
                    fused.spread(_shared(own, mean, ctx.reduce)),
                    fused.dz if ctx.needs_input_grad[3] else None,
                )
            else:
                own = halves.sums(grads[0])
                dx, dresidual = halves.spread(grads[0], _shared(own, mean, ctx.reduce), ctx.needs_input_grad[3])
        of_dz, of_dz_xhat = own
        dweight = None if weight is None else of_dz_xhat.to(weight.dtype)
        dbias = None if bias is None else of_dz.to(bias.dtype)
        return dx, dweight, dbias, dresidual, None, None, None, None


def _shared(own: Tensor, mean: Tensor, reduce: Reduce) -> Tensor:
    """Sums over all processes, exchanged in the type of the moments.

    All processes have that one; the type of a sum depends on what computes it, and without values that is another.
    """
    return reduce(own.to(mean.dtype, copy=True)).to(own.dtype)


class GradientHalves(NamedTuple):
    """The backward of `normalize` in two: what is summed, and how the sums, once shared, spread over x."""

    recipe: Recipe
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None  # this and the output: only where an activation follows the residual
    y: Tensor | None
    mask: Tensor | None
    moments: Moments

    def runs_on_torch(self) -> bool:
        """Whether torch's operators compute both halves; not those of a mask, which the reference spreads."""
        return self._planned() is None and self.mask is None and select.takes_torch()

    def sums(self, dy: Tensor) -> Tensor:
        """Sums of dz, the gradient of what enters the activation, and of dz * xhat, for each statistic."""
        plan = self._planned()
        if plan is not None:
            x = plan.dense(self.x)
            return native.backward_sums(dy, x, self.weight, self.bias, self._beside(x), self.moments, plan)
        back, over = self._reference(dy), self.recipe.over
        return torch.stack([back.dz.sum(over), (back.dz * back.xhat).sum(over)])

    def spread(self, dy: Tensor, sums: Tensor, wants_dresidual: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and of the residual, from the sums over all values that share the statistics."""
        plan = self._planned()
        if plan is not None:
            means = sums / self.moments.count if self.weight is None else sums * self.weight / self.moments.count
            x = plan.dense(self.x)
            tensors = (dy, x, self.weight, self.bias, self._beside(x), self.moments)
            return native.backward_apply(*tensors, plan, means, wants_dresidual, self.mask)
        back, weight = self._reference(dy), self.recipe.view(self.weight)
        kept = [1 if d in self.recipe.over else n for d, n in enumerate(self.x.shape)]
        of_g, of_g_xhat = (s.reshape(kept) if weight is None else s.reshape(kept) * weight for s in sums)
        count = torch.as_tensor(self.moments.count).expand(self.moments.mean.shape).reshape(kept)
        dx = back.dx((of_g, of_g_xhat), count, self.mask, self.recipe.centred).to(self.x.dtype)
        return dx, back.dz.to(dy.dtype) if wants_dresidual else None

    def _beside(self, dense: Tensor) -> Tensor | None:
        kept = self.y if native.is_output_kept(self.recipe.activation) else self.residual
        return None if kept is None else native.like(kept, dense)

    def _planned(self) -> Plan | None:
        return select.plan_for(self.x, self.recipe, self.weight, self.bias, self.residual, self.mask)

    def _reference(self, dy: Tensor) -> reference.Backward:
        kept = [1 if d in self.recipe.over else n for d, n in enumerate(self.x.shape)]
        wide = reference.working_dtype(self.x)
        m = Moments(self.moments.mean.to(wide).reshape(kept), self.moments.var.to(wide).reshape(kept), 0)
        weight, bias = self.recipe.view(self.weight), self.recipe.view(self.bias)
        return reference.Backward.of(dy, self.x, weight, bias, self.residual, m, self.recipe)
