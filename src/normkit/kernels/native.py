"""The C++ loops, for CPUs: each tensor is read and written as few times as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import reference
from normkit.kernels.core import loops
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

_LEAST_WEIGHT = 1e-3  # below, too little of the input is left in the output to be worked out again


# ---- calls of the core


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def like(dy: Tensor, x: Tensor) -> Tensor:
    """The output's gradient in the type and the layout of the input."""
    if dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    return dy if dy.stride() == x.stride() else torch.empty_like(x).copy_(dy)


def backward(
    plan: Plan,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    y: Any,
    both: Tensor,
    stored: bool,
    inverted: bool,
) -> Any:
    """Gradients of x, weight, bias and residual; `y` is there if the sign of an activation must be read from it."""
    if dy.dtype is not x.dtype or dy.stride() != x.stride():
        dy = like(dy, x)
    dx = torch.empty_like(x)
    plain_weight: Any = plan.plain(weight)
    plain_bias: Any = plan.plain(bias)
    dweight = torch.empty_like(plain_weight) if wants[1] else None
    dbias = torch.empty_like(plain_bias) if wants[2] else None
    dresidual = torch.empty_like(x) if y is not None and wants[3] else None
    loops.backward(
        *plan.arguments(x, plain_weight, plain_bias, both),
        0 if y is None else y.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        0 if dresidual is None else dresidual.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        stored,
        inverted,
    )
    if y is None and wants[3]:
        dresidual = dy  # nothing stands between the residual and the output
    if dweight is not None and plain_weight is not weight:
        dweight = plan.as_parameter(dweight, weight)
    if dbias is not None and plain_bias is not bias:
        dbias = plan.as_parameter(dbias, bias)
    return dx, dweight, dbias, dresidual


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    plan: Plan,
    update: tuple[float, ...],
) -> Tensor:
    """Write the output to `y`; return means and variances."""
    both = x.new_empty(2 * plan.statistics, dtype=torch.float64)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    loops.forward(*arguments, _pointer(residual), y.data_ptr(), *update)
    return both


class Normalize(torch.autograd.Function):
    """As `reference.Normalize`; of the input only itself is kept, and of an output with a residual the sign it has."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> Tensor:
        """Return the output."""
        plan, update, stored, kept = call
        ctx.plan, ctx.is_stored = plan, stored is not None
        # Statistics are neither an input nor an output: there is nothing for autograd to watch.
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


# What a call is beside its tensors: its plan, what moves along, statistics that are given and to which no gradient
# flows, and where to leave means and variances.
Call = tuple[Plan, tuple[float, ...], tuple[Tensor, Tensor] | None, list[Tensor] | None]


def _gradients(
    plan: Plan, wants: Sequence[bool], dy: Tensor, x: Tensor, weight: Any, bias: Any, residual: Tensor | None, _: Tensor
) -> tuple[Any, ...]:
    recipe = plan.recipe
    own = (recipe.view(weight), recipe.view(bias))
    dx, dweight, dbias, dresidual, _mask = reference.gradients(
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
        residual = torch.zeros_like(x).requires_grad_()  # whatever its value was, its gradient is the output's
    inputs = [t if wanted else None for t, wanted in zip((x, weight, bias, residual), wants, strict=False)]
    with torch.enable_grad():
        y = reference.normalize_stored(x, plan.recipe, Moments(both[0], both[1], 0), weight, bias, residual)
        found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy, create_graph=True))
    return tuple(None if t is None else next(found) for t in inputs)


class NormalizeInPlace(torch.autograd.Function):
    """As `Normalize`, into the input's own memory: the output is all that is kept, and the backward works out the rest.

    Rota Bulo, Porzi & Kontschieder 2018, with the normalised input recovered from the output by undoing the activation.
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


# ---- what the loops do

NO_UPDATE = (0, 0, 0, 0, 0.0)


# What Function.apply is without its questions about torch.func, which a plan has already answered.
apply = super(torch.autograd.Function, Normalize).apply


def call(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan, update: tuple[float, ...] = NO_UPDATE
) -> Tensor:
    """The output alone, of a call without anything unusual."""
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
    """Whether the input can be worked out from the output: nothing may be lost on the way."""
    if recipe.activation == "relu":
        return False
    return weight is None or weight.numel() == 0 or bool(weight.detach().abs().min() >= _LEAST_WEIGHT)


def moments(x: Tensor, plan: Plan) -> Moments:
    """As `reference.moments`, without a gradient and without the reduced dimensions."""
    both = x.new_empty(2 * plan.statistics, dtype=torch.float64)
    loops.moments(*plan.arguments(x, None, None, both))
    return plan.moments(both)


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


def evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    var: Tensor,
    plan: Plan,
) -> Tensor:
    """As `normalize_stored`, without autograd."""
    plain = mean.dtype is var.dtype is torch.float32 and mean.is_contiguous() and var.is_contiguous()
    if not plain:
        mean, var = mean.double().contiguous(), var.double().contiguous()
    y = torch.empty_like(x)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, mean)
    loops.evaluate(*arguments, _pointer(residual), y.data_ptr(), var.data_ptr(), not plain)
    return y


def backward_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None, m: Moments, plan: Plan
) -> Tensor:
    """The first half of a backward: sums of the gradient behind the activation, and of its product with xhat."""
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    sums = x.new_empty(2, *plan.shape, dtype=torch.float64)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    loops.backward_sums(*arguments, _pointer(y), dy.data_ptr(), sums[0].data_ptr(), sums[1].data_ptr())
    return sums


def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    m: Moments,
    plan: Plan,
    sums: Tensor,
    wants_dresidual: bool,
) -> tuple[Tensor, Tensor | None]:
    """The second half: the gradients of x and of the residual, from sums over everything that shares the statistics."""
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if wants_dresidual and y is not None else None
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    sums = sums.double().contiguous()
    loops.backward_apply(
        *plan.arguments(x, plain_weight, plain_bias, both),
        _pointer(y),
        dy.data_ptr(),
        dx.data_ptr(),
        _pointer(dresidual),
        sums[0].data_ptr(),
        sums[1].data_ptr(),
        float(m.count),
    )
    return dx, dy if wants_dresidual and y is None else dresidual


def copy_past_cache(source: Tensor, target: Tensor) -> None:
    """Copy between two tensors of one layout with stores that leave the cache alone: what memory by itself can do."""
    loops.copy(source.data_ptr(), target.data_ptr(), source.numel() * source.itemsize)


def update_of(stored: Moments, momentum: float | Tensor | None) -> tuple[float, ...] | None:
    """Return what moves these statistics along with a forward, or None if the core cannot: it writes plain memory."""
    mean, var, count = stored
    wide = mean.dtype is torch.float64
    if (
        not isinstance(momentum, float | int)
        or not (type(mean) is type(var) is Tensor)
        or mean.dtype is not var.dtype
        or not (wide or mean.dtype is torch.float32)
        or not (mean.is_cpu and mean.is_contiguous() and var.is_contiguous())
    ):
        return None
    if type(count) is Tensor:
        if count.dtype is not torch.int64 or not count.is_cpu:
            return None
        return (mean.data_ptr(), var.data_ptr(), count.data_ptr(), wide, momentum)
    return (mean.data_ptr(), var.data_ptr(), 0, wide, momentum) if isinstance(count, int) else None


def count_update(stored: Moments) -> None:
    """Let autograd know that these statistics were written, as an operator would."""
    mean, var, count = stored
    if not mean.is_inference():
        torch._C._increment_version((mean, var, count) if isinstance(count, Tensor) else (mean, var))
