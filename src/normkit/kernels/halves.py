"""A normalization by the C++ loops with statistics that are not simply those of x.

Each pass has two halves. Forward, statistics are settled and then used; backward, gradients are summed and the sums
spread. What happens between them is a `Seam`, and of the size of the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from normkit.kernels import native
from normkit.kernels.autograd import gradients_of
from normkit.kernels.plans import Plan
from normkit.moments import Moments


class Seam(Protocol):
    """What comes between the halves of one call."""

    def statistics(self, x: Tensor, parameters: Sequence[Tensor]) -> Moments:
        """What to normalize x with, without a gradient."""

    def between(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        """From the sums of dz and of dz * xhat, what is taken from each value, and the gradients of the parameters.

        With two means for each statistic, dx = (dz * weight - means[0] - xhat * means[1]) / std.
        """

    def again(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        """The output, made of operators, for derivatives of derivatives."""


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
    seam: Seam,
    mask: Tensor | None = None,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Return activation((x - mean) / sqrt(var + eps) * weight + bias + residual) with the seam's statistics.

    The mask says which values those depend on.
    """
    return cast(Tensor, InHalves.apply(x, weight, bias, residual, mask, plan, seam, *parameters))


class InHalves(torch.autograd.Function):
    """`normalize` with its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        plan: Plan,
        seam: Seam,
        *parameters: Tensor,
    ) -> Tensor:
        """Return the output."""
        dense = plan.dense(x)
        used = seam.statistics(dense, parameters)
        beside = None if residual is None else native.like(residual, dense)
        y = native.evaluate(dense, weight, bias, beside, used.mean, used.var, plan, no_backward=False)
        if plan.recipe.activation is None:
            residual = beside = None  # whatever its value, its gradient is dy
        elif native.is_output_kept(plan.recipe.activation):
            beside = None if residual is None else y
        ctx.plan, ctx.seam, ctx.used = plan, seam, used
        ctx.save_for_backward(dense, weight, bias, residual, beside, mask, *parameters)
        return native.like(y, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias, residual and the seam's parameters."""
        x, weight, bias, residual, beside, mask, *parameters = ctx.saved_tensors
        plan, seam, wants = ctx.plan, ctx.seam, ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated again, everything must be made of operators
            wanted = (*wants[:4], *wants[7:])
            found = gradients_of(seam.again, wanted, grads[0], x, weight, bias, residual, *parameters)
            return (*found[:4], None, None, None, *found[4:])
        tensors = (grads[0], x, weight, bias, beside, ctx.used)
        sums = native.backward_sums(*tensors, plan)
        means, of_parameters = seam.between(sums, weight)
        dx, dresidual = native.backward_apply(*tensors, plan, means, wants[3], mask)
        of_dz, of_dz_xhat = sums.reshape(2, -1, plan.layout.groups).sum(1)  # over populations
        dweight = of_dz_xhat.to(weight.dtype).reshape(weight.shape) if wants[1] else None
        dbias = of_dz.to(bias.dtype).reshape(bias.shape) if wants[2] else None
        own = (d.to(p.dtype) for d, p in zip(of_parameters, parameters, strict=True))
        return dx, dweight, dbias, dresidual, None, None, None, *own
