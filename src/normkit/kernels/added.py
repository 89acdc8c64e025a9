"""The sum of two tensors, normalized in the pass that adds them, by the C++ loops."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from normkit.kernels.autograd import differentiable_gradients
from normkit.kernels.native import Sum, backward, forward
from normkit.kernels.plans import Plan


class NormalizeSum(torch.autograd.Function):
    """Of (one + other): the output, and the sum. The sum is all that is kept; its gradient is added on the way back."""

    @staticmethod
    def forward(
        ctx: Any, one: Tensor, other: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the sum."""
        y, total, ctx.both = _forward(one, other, weight, bias, plan)
        ctx.plan = plan
        ctx.save_for_backward(total, weight, bias)
        ctx.set_materialize_grads(False)  # whoever has no use for the sum does not pay for a gradient of zeros
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of both addends, which are the same, of weight and of bias."""
        dy, dtotal = grads
        if dy is None:
            return dtotal, dtotal, None, None, None
        total, weight, bias = ctx.saved_tensors
        wants = (True, *ctx.needs_input_grad[2:4], False)
        if torch.is_grad_enabled():  # to be differentiated again, it must be made of operators
            dx, dweight, dbias, _ = differentiable_gradients(ctx.plan, wants, dy, total, weight, bias, None, None)
            dx = dx if dtotal is None else dx + dtotal
        else:
            own = (dy, total, weight, bias, None, ctx.both)
            dx, dweight, dbias, _ = backward(ctx.plan, wants, *own, False, False, dx_beside=dtotal)
        return dx, dx, dweight, dbias, None


def _forward(
    one: Tensor, other: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, no_backward: bool = False
) -> tuple[Tensor, Tensor, bytearray]:
    y, total = torch.empty_like(one), torch.empty_like(one)
    both, _ = forward(total, weight, bias, None, y, plan, no_backward=no_backward, beyond=Sum(one, other))
    return y, total, both


_apply = super(torch.autograd.Function, NormalizeSum).apply  # see `autograd.apply`


def normalize_sum(
    one: Tensor, other: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return one + other normalized, and one + other: contiguous tensors of one type, whose plan is one of lines."""
    if torch.is_grad_enabled():
        return cast(tuple[Tensor, Tensor], _apply(one, other, weight, bias, plan))
    return _forward(one, other, weight, bias, plan, no_backward=True)[:2]
