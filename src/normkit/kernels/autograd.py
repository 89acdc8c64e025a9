"""The C++ loops with their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import reference
from normkit.kernels.native import NO_UPDATE, backward, evaluate, forward
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

_LEAST_WEIGHT = 1e-3  # below this, too little of the input is left in the output to be worked out again


class Normalize(torch.autograd.Function):
    """As `reference.Normalize`; only the input is kept and, where an activation follows a residual, the output too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> Tensor:
        """Return the output."""
        plan, update, stored, kept = call
        ctx.plan, ctx.is_stored = plan, stored is not None
        # Statistics are neither inputs nor outputs of the function: autograd need not follow them.
        if stored is None:
            y = torch.empty_like(x)
            ctx.both = forward(x, weight, bias, residual, y, plan, update)
        else:
            y = evaluate(x, weight, bias, residual, *stored, plan)
            ctx.both = torch.stack(stored).double()
        if kept is not None:
            kept.append(ctx.both)
        if residual is None or plan.recipe.activation is None:
            ctx.save_for_backward(x, weight, bias)
        else:
            ctx.save_for_backward(x, weight, bias, residual, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, *signed = ctx.saved_tensors
        residual, y = signed or (None, None)
        wants, stored = ctx.needs_input_grad, ctx.is_stored
        if not torch.is_grad_enabled():
            return (*backward(ctx.plan, wants, grads[0], x, weight, bias, y, ctx.both, stored, False), None)
        # To be differentiated again, it must be made of operators.
        again = _gradients_of_stored if stored else _gradients
        return (*again(ctx.plan, wants, grads[0], x, weight, bias, residual, ctx.both), None)


# What a call is apart from its tensors: its plan, the update of running statistics, stored statistics (which get no
# gradient), and a list to append means and variances to.
Call = tuple[Plan, tuple[float, ...], tuple[Tensor, Tensor] | None, list[Tensor] | None]


def _gradients(
    plan: Plan, wants: Sequence[bool], dy: Tensor, x: Tensor, weight: Any, bias: Any, residual: Tensor | None, _: Tensor
) -> tuple[Any, ...]:
    recipe = plan.recipe
    own = (recipe.view(weight), recipe.view(bias))
    dx, dweight, dbias, dresidual = reference.gradients(
        plan.divided(dy), plan.divided(x), *own, residual, None, recipe, wants[3]
    )
    dweight = None if dweight is None else dweight.reshape(weight.shape)
    dbias = None if dbias is None else dbias.reshape(bias.shape)
    return plan.undivided(dx), dweight, dbias, dresidual


def _gradients_of_stored(
    plan: Plan,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    residual: Tensor | None,
    both: Tensor,
) -> tuple[Any, ...]:
    if residual is None and wants[3]:
        residual = torch.zeros_like(x).requires_grad_()  # its gradient is the output's, whatever its value
    inputs = [t if wanted else None for t, wanted in zip((x, weight, bias, residual), wants, strict=False)]
    with torch.enable_grad():
        y = reference.normalize_stored(x, plan.recipe, Moments(both[0], both[1], 0), weight, bias, residual)
        found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy, create_graph=True))
    return tuple(None if t is None else next(found) for t in inputs)


class NormalizeInPlace(torch.autograd.Function):
    """As `Normalize`, into the input's own memory: the output is all that is kept, and the backward works out the rest.

    Rota Bulo, Porzi & Kontschieder 2018, with the normalized input recovered from the output by undoing the activation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
        update: tuple[float, ...],
        kept: list[Tensor],
    ) -> Tensor:
        """Return the input, overwritten, and leave means and variances in `kept`."""
        ctx.plan = plan
        ctx.both = forward(x, weight, bias, None, x, plan, update)
        kept.append(ctx.both)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        y, weight, bias = ctx.saved_tensors
        found = backward(ctx.plan, ctx.needs_input_grad, grads[0], y, weight, bias, None, ctx.both, False, True)
        return (*found[:3], None, None, None)


# ---- what is called


# Function.apply without its checks for torch.func, which a plan has already made.
apply = super(torch.autograd.Function, Normalize).apply


def call(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, update: tuple[float, ...] = NO_UPDATE
) -> Tensor:
    """Return the output alone, of a call on the fast path."""
    return cast(Tensor, apply(x, weight, bias, None, (plan, update, None, None)))


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
    inplace: bool = False,
    update: tuple[float, ...] = NO_UPDATE,
) -> tuple[Tensor, Tensor]:
    """Return what `reference.normalize` does, and means and variances for `plan.moments`.

    In place, the result is in the memory of x, if that can be worked out again from the result.
    """
    kept: list[Tensor] = []
    if inplace and residual is None and _is_invertible(plan.recipe, weight):
        y = NormalizeInPlace.apply(x, weight, bias, plan, update, kept)
    else:
        y = apply(x, weight, bias, residual, (plan, update, None, kept))
    return y, kept[0]


def _is_invertible(recipe: Recipe, weight: Tensor | None) -> bool:
    """Whether the input can be worked out from the output."""
    if recipe.activation == "relu":
        return False
    return weight is None or weight.numel() == 0 or bool(weight.detach().abs().min() >= _LEAST_WEIGHT)


def normalize_stored(
    x: Tensor,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
) -> Tensor:
    """As `reference.normalize_stored`, for statistics without a gradient."""
    mean, var = stored.mean, stored.var
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, residual)):
        return cast(Tensor, apply(x, weight, bias, residual, (plan, NO_UPDATE, (mean, var), None)))
    return evaluate(x, weight, bias, residual, mean, var, plan)
