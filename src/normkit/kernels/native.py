"""Calls of the C++ loops, for CPUs: each tensor is read and written as few times as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import core
from normkit.kernels.core import loops
from normkit.kernels.plans import TYPES, Memory, Plan
from normkit.moments import Moments

Update = tuple[float, ...]  # of running statistics: see `update_of`
NO_UPDATE: Update = (0, 0, 0, 0, 0.0, 0)
_NON_FINITE = {"propagate": 0, "raise": 1, "skip-update": 2}

# What a forward says of itself: see Outcome in csrc/module.cpp.
DONE, ODD_PADDING, NON_FINITE = 0, 1, 2

WORTH_TURNING = 1 << 14  # values: of fewer, torch's copy takes no longer


class Renorm(NamedTuple):
    """Of batch renormalization: what takes the place of xhat is xhat * r + d, for each statistic."""

    correction: Tensor  # (2, C) in double: r and d
    running: tuple[Tensor, Tensor] | None = None  # means and variances that they are set from; None: they are given
    limits: tuple[float, float] = (1.0, 0.0)  # of r and d


class Merge(NamedTuple):
    """Other statistics, that those of x are merged with."""

    others: Tensor  # (2, C) in double: means and variances
    values: int  # that each is made of
    own: Tensor  # where those of x alone are kept, as the others


class Sum(NamedTuple):
    """Two tensors that are added first: x is room for their sum."""

    one: Tensor
    other: Tensor


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def like(t: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of the shape of x in the type and the layout of x; itself, if it has both."""
    if t.dtype is not x.dtype:
        t = t.to(x.dtype)
    if t.stride() == x.stride():
        return t
    target = torch.empty_like(x)  # dense, where x is a part of a larger tensor
    return t if t.stride() == target.stride() else copied(t, target)


def may_turn(t: Tensor) -> bool:
    """Whether the loops copy such a tensor to another layout faster than torch."""
    return t.dtype is torch.float32 and t.numel() >= WORTH_TURNING and t.is_cpu and core.WHY_NOT is None


def copied(t: Tensor, target: Tensor) -> Tensor:
    """Copy values between two memory layouts. Where one has positions side by side and the other channels, loops do."""
    is_alike = target.dtype is t.dtype and target.is_cpu
    turned = _turned(t, target) if is_alike and may_turn(t) else None
    if turned is None:
        return target.copy_(t)
    loops.turn_over(t.data_ptr(), target.data_ptr(), *turned)
    return target


def _turned(t: Tensor, target: Tensor) -> tuple[int, int, int] | None:
    """The matrices, their rows and their columns, that one has to turn over to copy; None if it is another copy."""
    if t.dim() < 3:
        return None
    one, other = (t, target) if t.is_contiguous() else (target, t)
    if not one.is_contiguous():
        return None
    examples, size = t.shape[0], t.numel() // t.shape[0]
    for dim, moved in ((1, -1), (-1, 1)):
        if other.movedim(dim, moved).is_contiguous():
            channels = t.shape[dim]
            # Of the contiguous one the channels are rows where they come before the positions.
            are_rows = (dim == 1) == (one is t)
            return (examples, channels, size // channels) if are_rows else (examples, size // channels, channels)
    return None


def backward(
    plan: Plan,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    beside: Any,
    both: Memory,
    stored: bool,
    inverted: bool,
    mask: Tensor | None = None,
    others: int = 0,
    correction: Tensor | None = None,
    dx_beside: Tensor | None = None,
) -> Any:
    """Gradients of x, weight, bias and residual; `beside` is what `is_output_kept` says, where there is a residual.

    Each statistic is made of as many `others` as well as of values of x. For `correction` see `Renorm`. What x gets
    along beside the norm, where it is a `Sum`, is `dx_beside`.
    """
    if dy.dtype is not x.dtype or dy.stride() != x.stride():
        dy = like(dy, x)
    dx = torch.empty_like(x)
    plain_weight: Any = plan.plain(weight)
    plain_bias: Any = plan.plain(bias)
    dweight = torch.empty_like(plain_weight) if wants[1] else None
    dbias = torch.empty_like(plain_bias) if wants[2] else None
    dresidual = torch.empty_like(x) if beside is not None and wants[3] else None
    arguments = (
        *plan.arguments(x, plain_weight, plain_bias, both),
        0 if beside is None else beside.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        0 if dresidual is None else dresidual.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        stored,
        inverted,
        others,
        0 if correction is None else correction.data_ptr(),
    )
    if dx_beside is None:
        loops.backward(*arguments)
    else:
        dx_beside = like(dx_beside, x)  # kept until the loops have read it
        loops.backward_sum(*arguments, dx_beside.data_ptr())
    if beside is None and wants[3]:
        dresidual = dy  # nothing comes between the residual and the output
    if dweight is not None and plain_weight is not weight:
        dweight = plan.as_parameter(dweight, weight)
    if dbias is not None and plain_bias is not bias:
        dbias = plan.as_parameter(dbias, bias)
    return dx, dweight, dbias, dresidual


def is_output_kept(activation: str | None) -> bool:
    """Whether a backward with a residual tells the activation's slope from the output; else it needs the residual."""
    return activation in ("relu", "leaky_relu")


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    plan: Plan,
    update: Update = NO_UPDATE,
    mask: Tensor | None = None,
    no_backward: bool = False,
    beyond: Renorm | Merge | Sum | None = None,
) -> tuple[bytearray, int]:
    """Write the output to `y`; return means and variances, and the outcome.

    What is `beyond` the statistics of x, if anything, corrects them, or says what x is. The mask has contiguous
    booleans for each example and position, as they broadcast against x. Without a backward to follow, the output of a
    larger tensor is left in the cache, for what reads it next.
    """
    both = bytearray(plan.statistics * 16)  # a tensor takes several times as long to make
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    arguments = (*arguments, _pointer(residual), y.data_ptr(), _pointer(mask), *update, no_backward)
    if beyond is None:
        return both, loops.forward(*arguments)
    if isinstance(beyond, Sum):
        return both, loops.forward_sum(*arguments, beyond.one.data_ptr(), beyond.other.data_ptr())
    if isinstance(beyond, Merge):
        return both, loops.merge(*arguments, beyond.others.data_ptr(), beyond.values, beyond.own.data_ptr())
    mean, var = beyond.running or (None, None)
    kind = 0 if mean is None else TYPES[mean.dtype]
    correction = beyond.correction.data_ptr()
    return both, loops.renormalize(*arguments, correction, _pointer(mean), _pointer(var), kind, *beyond.limits)


def moments(x: Tensor, plan: Plan, mask: Tensor | None = None) -> Moments:
    """As `reference.moments`, without a gradient and without the reduced dimensions."""
    x, mask = plan.dense(x), None if mask is None else mask.contiguous()
    both = bytearray(plan.statistics * 16)
    loops.moments(*plan.arguments(x, None, None, both), _pointer(mask))
    return plan.moments(both, mask)


def evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    var: Tensor,
    plan: Plan,
    no_backward: bool = True,
) -> Tensor:
    """As `normalize_stored`, without autograd; x and the residual have one layout."""
    plain = mean.dtype is var.dtype and mean.dtype in TYPES and mean.is_contiguous() and var.is_contiguous()
    if not plain:
        mean, var = mean.double().contiguous(), var.double().contiguous()
    y = torch.empty_like(x)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, mean)
    loops.evaluate(*arguments, _pointer(residual), y.data_ptr(), var.data_ptr(), TYPES[mean.dtype], no_backward)
    return y


def backward_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, beside: Tensor | None, m: Moments, plan: Plan
) -> Tensor:
    """The first half of a backward: sums of dz, the gradient of what enters the activation, and of dz * xhat."""
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    sums = x.new_empty(2, *plan.shape, dtype=torch.float64)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    loops.backward_sums(*arguments, _pointer(beside), dy.data_ptr(), sums[0].data_ptr(), sums[1].data_ptr())
    return sums


def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    beside: Tensor | None,
    m: Moments,
    plan: Plan,
    means: Tensor,
    wants_dresidual: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The second half: the gradients of x and of the residual.

    `means` are those of g = dz * weight and of g * xhat, over everything that shares a statistic.
    """
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if wants_dresidual and beside is not None else None
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    means, mask = means.double().contiguous(), None if mask is None else mask.contiguous()
    loops.backward_apply(
        *plan.arguments(x, plain_weight, plain_bias, both),
        _pointer(beside),
        dy.data_ptr(),
        dx.data_ptr(),
        _pointer(dresidual),
        means[0].data_ptr(),
        means[1].data_ptr(),
        _pointer(mask),
    )
    return dx, dy if wants_dresidual and beside is None else dresidual


def copy_past_cache(source: Tensor, target: Tensor) -> None:
    """Copy between two tensors of one layout with stores that leave the cache alone: what memory by itself can do."""
    loops.copy(source.data_ptr(), target.data_ptr(), source.numel() * source.itemsize)


def is_plain_memory(mean: Tensor, var: Tensor) -> bool:
    """Whether the core can read and write running statistics where they lie: plain tensors of one type."""
    return (
        type(mean) is type(var) is Tensor
        and mean.dtype is var.dtype
        and mean.dtype in TYPES
        and mean.is_cpu
        and mean.is_contiguous()
        and var.is_contiguous()
    )


def update_of(
    mean: Tensor,
    var: Tensor,
    count: int | Tensor,
    momentum: float | Tensor | None,
    nonfinite: str = "propagate",
) -> Update | None:
    """Return what moves these statistics along with a forward, as `Update` in csrc/update.h; None if it cannot."""
    if not is_plain_memory(mean, var) or mean.is_inference():
        return None
    counter = 0
    if isinstance(count, Tensor):
        if type(count) is not Tensor or count.dtype is not torch.int64 or not count.is_cpu:
            return None
        counter = count.data_ptr()
    if momentum is None and counter:
        momentum = -1.0  # a plain average over the batches counted
    if not isinstance(momentum, float | int):
        return None
    return mean.data_ptr(), var.data_ptr(), counter, TYPES[mean.dtype], momentum, _NON_FINITE[nonfinite]


def count_update(mean: Tensor, var: Tensor, count: int | Tensor) -> None:
    """Let autograd know that these statistics were written, as an operator would."""
    torch._C._increment_version((mean, var, count) if isinstance(count, Tensor) else (mean, var))
