"""The C++ loops with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import reference
from normkit.kernels.fused import is_invertible
from normkit.kernels.native import (
    DONE,
    NO_UPDATE,
    ODD_PADDING,
    Merge,
    Renorm,
    Update,
    backward,
    evaluate,
    forward,
    is_output_kept,
    like,
)
from normkit.kernels.plans import Plan
from normkit.moments import Moments


class Call(NamedTuple):
    """What a call is apart from its tensors, and what it leaves."""

    plan: Plan
    update: Update = NO_UPDATE  # of running statistics
    stored: tuple[Tensor, Tensor] | None = None  # means and variances to normalize with
    others: int | None = None  # values beside those of x in what is stored or merged; None: those of x are not in it
    again: Any = None  # an `Again` of the output, where it depends on more than the tensors of the call
    mask: Tensor | None = None
    kept: list[Any] | None = None  # to append means and variances to, and the outcome
    beyond: Renorm | Merge | None = None  # what corrects the statistics of x


class Normalize(torch.autograd.Function):
    """As `reference.Normalize`; only the input is kept and, where an activation follows a residual, one tensor more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> Tensor:
        """Return the output."""
        plan, update, stored, others, again, mask, kept, beyond = call
        given = x
        if plan.copy is not None:
            x = plan.dense(given)
        beside = None if residual is None else like(residual, x)
        ctx.plan, ctx.is_stored, ctx.mask = plan, stored is not None and others is None, mask
        ctx.others, ctx.again, ctx.correction = others or 0, again, getattr(beyond, "correction", None)
        # Statistics are neither inputs nor outputs of the function: autograd need not follow them.
        outcome = DONE
        if stored is None:
            y = torch.empty_like(x)
            ctx.both, outcome = forward(x, weight, bias, beside, y, plan, update, mask, beyond=beyond)
        else:
            y = evaluate(x, weight, bias, beside, *stored, plan, no_backward=False)
            ctx.both = torch.stack(stored).double()
        if kept is not None:
            kept += ctx.both, outcome
        if residual is None or plan.recipe.activation is None:
            ctx.save_for_backward(x, weight, bias)
        else:
            ctx.save_for_backward(x, weight, bias, residual, y if is_output_kept(plan.recipe.activation) else beside)
        return y if plan.copy is None else like(y, given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, *signed = ctx.saved_tensors
        residual, beside = signed or (None, None)
        wants, stored = ctx.needs_input_grad, ctx.is_stored
        if not torch.is_grad_enabled():
            tensors, rest = (x, weight, bias, beside, ctx.both), (ctx.mask, ctx.others, ctx.correction)
            return (*backward(ctx.plan, wants, grads[0], *tensors, stored, False, *rest), None)
        # To be differentiated again, it must be made of operators.
        again = _stored_again(ctx.plan, ctx.both) if stored else ctx.again
        if again is not None:
            return (*gradients_of(again, wants, grads[0], x, weight, bias, residual), None)
        return (*differentiable_gradients(ctx.plan, wants, grads[0], x, weight, bias, residual, ctx.mask), None)


def differentiable_gradients(
    plan: Plan,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    residual: Tensor | None,
    mask: Tensor | None,
) -> tuple[Any, ...]:
    """Gradients of x, weight, bias and residual, made of operators."""
    recipe = plan.recipe
    own = (recipe.view(weight), recipe.view(bias))
    dx, dweight, dbias, dresidual = reference.gradients(
        plan.divided(dy), plan.divided(x), *own, residual, mask, recipe, wants[3]
    )
    dweight = None if dweight is None else dweight.reshape(weight.shape)
    dbias = None if dbias is None else dbias.reshape(bias.shape)
    return plan.undivided(dx), dweight, dbias, dresidual


Again = Callable[..., Tensor]  # of x, weight, bias, residual, and what else a function takes


def gradients_of(
    again: Again,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    residual: Tensor | None,
    *others: Tensor,
) -> tuple[Any, ...]:
    """Gradients that can be differentiated, of the same output made again of operators."""
    if residual is None and wants[3]:
        residual = torch.zeros_like(x).requires_grad_()  # its gradient is the output's, whatever its value
    tensors = (x, weight, bias, residual, *others)
    inputs = [t if wanted else None for t, wanted in zip(tensors, wants, strict=False)]
    with torch.enable_grad():
        y = again(*tensors)
        found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy, create_graph=True))
    return tuple(None if t is None else next(found) for t in inputs)


def _stored_again(plan: Plan, both: Tensor) -> Again:
    def again(x: Tensor, weight: Any, bias: Any, residual: Tensor | None) -> Tensor:
        return reference.normalize_stored(x, plan.recipe, Moments(both[0], both[1], 0), weight, bias, residual)

    return again


def _renormalized_again(plan: Plan, mask: Tensor | None, correction: Tensor) -> Again:
    def again(x: Tensor, weight: Any, bias: Any, residual: Tensor | None) -> Tensor:
        r, d = correction
        weight, shift = (r, d) if weight is None else (weight * r, weight * d)
        bias = shift if bias is None else bias + shift
        recipe = plan.recipe
        return reference.normalize(x, recipe.view(weight), recipe.view(bias), residual, mask, recipe)[0]

    return again


class NormalizeAlone(torch.autograd.Function):
    """As `Normalize`, of tensors that need no copy, with nothing beside them: where Python takes most of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, update: Update) -> Tensor:
        """Return the output."""
        y = torch.empty_like(x)
        ctx.plan, (ctx.both, _) = plan, forward(x, weight, bias, None, y, plan, update)
        ctx.save_for_backward(x, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        x, weight, bias = ctx.saved_tensors
        wants = ctx.needs_input_grad  # not of a plan, which comes where a residual would
        if torch.is_grad_enabled():  # as in `Normalize`
            found = differentiable_gradients(ctx.plan, wants, grads[0], x, weight, bias, None, None)
        else:
            found = backward(ctx.plan, wants, grads[0], x, weight, bias, None, ctx.both, False, False)
        return (*found[:3], None, None)


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
        update: Update,
        kept: list[Any],
    ) -> Tensor:
        """Return the input, overwritten, and leave means, variances and the outcome in `kept`."""
        ctx.plan = plan
        ctx.both, outcome = forward(x, weight, bias, None, x, plan, update)
        kept += ctx.both, outcome
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
_apply_alone = super(torch.autograd.Function, NormalizeAlone).apply


def call(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, update: Update = NO_UPDATE) -> Tensor:
    """Return the output alone, of a call on the fast path."""
    if plan.copy is None and torch.is_grad_enabled():
        return cast(Tensor, _apply_alone(x, weight, bias, plan, update))
    if plan.copy is None:
        y = torch.empty_like(x)
        forward(x, weight, bias, None, y, plan, update, no_backward=True)
        return y
    return cast(Tensor, apply(x, weight, bias, None, Call(plan, update)))


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
    inplace: bool = False,
    update: Update = NO_UPDATE,
    mask: Tensor | None = None,
    renorm: Renorm | None = None,
) -> tuple[Tensor, bytearray, int]:
    """Return what `reference.normalize` does, means and variances for `plan.moments`, and the outcome.

    In place, the result is in the memory of x, if that can be worked out again from the result.
    """
    kept: list[Any] = []
    is_alone = residual is None and mask is None and plan.copy is None
    if inplace and is_alone and is_invertible(plan.recipe, weight):
        y = NormalizeInPlace.apply(x, weight, bias, plan, update, kept)
    else:
        again = None if renorm is None else _renormalized_again(plan, mask, renorm.correction)
        y = apply(x, weight, bias, residual, Call(plan, update, again=again, mask=mask, kept=kept, beyond=renorm))
    both, outcome = kept
    if outcome == ODD_PADDING:  # which counts as zero, and no gradient of zero would remove a NaN
        assert mask is not None
        x = torch.where(mask | x.isfinite(), x, 0)
        return normalize(x, weight, bias, residual, plan, inplace, update, mask, renorm)
    return y, both, outcome


def normalize_merged(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
    merge: Merge,
    again: Again,
) -> tuple[Tensor, bytearray]:
    """As `normalize`, with the statistics of others merged in, through which no gradient flows."""
    kept: list[Any] = []
    y = apply(x, weight, bias, residual, Call(plan, others=merge.values, again=again, kept=kept, beyond=merge))
    return y, kept[0]


def normalize_known(
    x: Tensor, known: Moments, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, plan: Plan
) -> Tensor:
    """As `normalize`, of x whose moments are already known."""
    return cast(Tensor, apply(x, weight, bias, residual, Call(plan, stored=(known.mean, known.var), others=0)))


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
        return cast(Tensor, apply(x, weight, bias, residual, Call(plan, stored=(mean, var))))
    dense = plan.dense(x)
    y = evaluate(dense, weight, bias, None if residual is None else like(residual, dense), mean, var, plan)
    return y if dense is x else like(y, x)
