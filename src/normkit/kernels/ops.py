"""The operators that stand for a whole normalization in a recorded graph, computed by the C++ loops.

A compiler would otherwise see some thirty operators, and generate a backward several times slower than the loops. It
knows types and symbols where the loops need sizes and strides, so how to run is decided when an operator runs.

`torch.library.custom_op` would take fewer lines, but twice the time, at every `import normkit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from normkit.activations import ACTIVATIONS
from normkit.errors import ShapeError
from normkit.kernels import native, reference, select
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

_WIDE = torch.float64  # the type of statistics

_TENSORS = "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual"
_RECIPE = "int[] over, float eps, str? activation, bool centred, SymInt[]? parameters"


# ---- what the operators do


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *terms: Any
) -> tuple[Tensor, Tensor]:
    """Return the output, and means and variances: (2, ...) without the dimensions they are over."""
    recipe = _recipe(*terms)
    _check(x, recipe, (residual,), (weight, bias))
    dense, beside, plan = _planned(x, weight, bias, residual, recipe)
    if plan is None:
        y, m = reference.normalize(x, recipe.view(weight), recipe.view(bias), residual, None, recipe)
        statistics = torch.stack([m.mean.squeeze(recipe.over), m.var.squeeze(recipe.over)]).to(_WIDE)
    else:
        y = torch.empty_like(dense)
        statistics = plan.both(native.forward(dense, weight, bias, beside, y, plan)[0])
    return native.like(y, x), statistics


def _normalize_stored(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *terms: Any,
) -> tuple[Tensor, Tensor]:
    """As `_normalize`, with given statistics. They are returned as a copy: the graph may write to them later."""
    recipe = _recipe(*terms)
    _check(x, recipe, (residual,), (weight, bias, mean, var))
    statistics = torch.stack([mean, var]).to(_WIDE)
    dense, beside, plan = _planned(x, weight, bias, residual, recipe, statistics)
    if plan is None:
        y = reference.normalize_stored(x, recipe, Moments(mean, var, 0), weight, bias, residual)
    else:
        y = native.evaluate(dense, weight, bias, beside, statistics[0], statistics[1], plan)
    return native.like(y, x), statistics


def _normalize_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor | None,
    statistics: Tensor,
    *terms: Any,
) -> list[Tensor]:
    """Return the gradient of x, and those of weight, bias and residual that are wanted; `kept` is as in `_keep`."""
    *rest, stored, wants = terms
    recipe = _recipe(*rest)
    _check(x, recipe, (dy, kept), (weight, bias))
    statistics = statistics.to(_WIDE).contiguous()
    dense, beside, plan = _planned(x, weight, bias, kept, recipe, statistics)
    found: Sequence[Any]
    if plan is None:
        m = _moments(x, statistics, recipe, stored)
        found = _gradients(dy.to(_WIDE, copy=True), x, weight, bias, kept, m, recipe, stored)
    else:
        found = native.backward(plan, (True, *wants), dy, dense, weight, bias, beside, statistics, stored, False)
    return [native.like(g, t) for g, t in zip(_wanted(found, wants), _wanted((x, weight, bias, x), wants), strict=True)]


def _recipe(
    over: Sequence[int], eps: float, activation: str | None, centred: bool, parameters: Sequence[int] | None
) -> Recipe:
    return Recipe(tuple(over), eps, activation, centred, None if parameters is None else tuple(parameters))


def _check(x: Tensor, recipe: Recipe, alike: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> None:
    """Check that the tensors of a call fit each other, wherever the graph came from: what follows reads pointers."""
    for t in alike:
        if t is not None and t.shape != x.shape:
            raise ShapeError(f"normkit::normalize needs tensors of one shape, {tuple(x.shape)}; got {tuple(t.shape)}.")
    given = [t for t in parameters if t is not None]
    if not given:
        return
    shape = recipe.parameters or given[0].shape
    fits = len(shape) <= x.dim() and all(n in (1, m) for n, m in zip(reversed(shape), reversed(x.shape), strict=False))
    if not fits or any(t.numel() != prod(shape) for t in given):
        sizes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ShapeError(
            f"normkit::normalize needs parameters and statistics that can be viewed as {tuple(shape)} and broadcast "
            f"to the input's {tuple(x.shape)}; got {sizes}."
        )


def _planned(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other: Tensor | None,
    recipe: Recipe,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Plan | None]:
    """Return x and another tensor in memory that the loops can go over, and their plan, or None if they cannot."""
    plan = select.plan_for(x, recipe, weight, bias, other)
    if plan is not None and statistics is not None and statistics.numel() != 2 * plan.statistics:
        plan = None
    if plan is not None:
        x = plan.dense(x)
    return x, None if other is None or other.dtype is not x.dtype else native.like(other, x), plan


def _wanted(of_all: Sequence[Any], wants: Sequence[bool]) -> list[Any]:
    """What belongs to x, and to weight, bias and residual those that are wanted."""
    first, *others = of_all
    return [first, *(one for one, wanted in zip(others, wants, strict=True) if wanted)]


# ---- the gradient, made of torch's operators


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor | None,
    m: Moments,
    recipe: Recipe,
    stored: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and residual."""
    if kept is not None and recipe.activation is not None and native.is_output_kept(recipe.activation):
        dy = dy * ACTIVATIONS[recipe.activation].slope(kept.to(m.mean.dtype))
        recipe, kept = recipe._replace(activation=None), None
    scale, shift = recipe.view(weight), recipe.view(bias)
    dx, dweight, dbias, dresidual = reference.gradients(dy, x, scale, shift, kept, None, recipe, True, m, stored)
    return dx, _shaped(dweight, weight), _shaped(dbias, bias), dresidual


def _shaped(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.reshape(parameter.shape)


def _moments(x: Tensor, statistics: Tensor, recipe: Recipe, stored: bool) -> Moments:
    """Means and variances as they broadcast against x."""
    mean, var = statistics
    shape: Sequence[int] = [1 if d in recipe.over else n for d, n in enumerate(x.shape)]
    if stored:
        shape = recipe.parameters or mean.shape
    return Moments(mean.reshape(shape), var.reshape(shape), reference.count_values(x, recipe.over))


# ---- what is registered for autograd and compilers


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the input and, where an activation follows a residual, what its slope can be worked out from."""
    x, weight, bias, residual, *rest = inputs
    y, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.terms, ctx.no_gradients = rest[-5:], (None,) * len(rest)
    activation, ctx.stored = ctx.terms[2], len(rest) > 5
    kept = None
    if residual is not None and activation is not None:
        kept = y if native.is_output_kept(activation) else residual
    ctx.save_for_backward(x, weight, bias, kept, statistics)


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, kept, statistics = ctx.saved_tensors
    recipe, wants = _recipe(*ctx.terms), ctx.needs_input_grad[1:4]
    found: Sequence[Any]
    if torch.is_grad_enabled():
        # To be differentiated again, the gradient must be made of operators, and the batch's statistics of x.
        m = _moments(x, statistics, recipe, ctx.stored)
        if not ctx.stored:
            m = reference.moments(x, recipe.over, None, recipe.centred)
        dx, *found = _gradients(dy, x, weight, bias, kept, m, recipe, ctx.stored)
    else:
        asked = [*wants[:2], wants[2] and recipe.activation is not None]
        tensors = (dy, x, weight, bias, kept, statistics)
        dx, *given = torch.ops.normkit.normalize_backward(*tensors, *ctx.terms, ctx.stored, asked)
        found = [given.pop(0) if one else None for one in asked]
    if recipe.activation is None:
        found[2] = dy  # nothing comes between the residual and the output
    return (dx, *(g if wanted else None for g, wanted in zip(found, wants, strict=True)), *ctx.no_gradients)


def _normalize_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *terms: Any
) -> tuple[Tensor, Tensor]:
    recipe = _recipe(*terms)
    _check(x, recipe, (residual,), (weight, bias))
    sizes = [n for d, n in enumerate(x.shape) if d not in recipe.over]
    return torch.empty_like(x), x.new_empty([2, *sizes], dtype=_WIDE)


def _normalize_stored_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *terms: Any,
) -> tuple[Tensor, Tensor]:
    _check(x, _recipe(*terms), (residual,), (weight, bias, mean, var))
    return torch.empty_like(x), mean.new_empty([2, *mean.shape], dtype=_WIDE)


def _normalize_backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any
) -> list[Tensor]:
    return [torch.empty_like(t) for t in _wanted((x, weight, bias, x), wants=others[-1])]


_library = torch.library.Library("normkit", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], differentiable: bool) -> None:
    name = "normkit::" + schema.partition("(")[0]
    _library.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    torch.library.register_kernel(name, None, kernel, lib=_library)
    torch.library.register_fake(name, fake, lib=_library)
    if differentiable:
        torch.library.register_autograd(name, _differentiate, setup_context=_keep, lib=_library)


_define(
    f"normalize({_TENSORS}, {_RECIPE}) -> (Tensor y, Tensor statistics)",
    _normalize,
    _normalize_fake,
    differentiable=True,
)
_define(
    f"normalize_stored({_TENSORS}, Tensor mean, Tensor var, {_RECIPE}) -> (Tensor y, Tensor statistics)",
    _normalize_stored,
    _normalize_stored_fake,
    differentiable=True,
)
_define(
    "normalize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? kept, Tensor statistics, "
    f"{_RECIPE}, bool stored, bool[3] wants) -> Tensor[]",
    _normalize_backward,
    _normalize_backward_fake,
    differentiable=False,
)
