"""Bounded functions of single values, with gamma and beta: by the loops of batch norms, or by torch's operators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from normkit.kernels import masked, reference
from normkit.kernels.reference import Recipe
from normkit.kernels.select import normalize_stored, plan_for, refuse_loops, requested
from normkit.moments import Moments
from normkit.tracing import is_exporting, is_plain

Function = Literal["tanh", "erf"]


def squashed(
    x: Tensor,
    function: Function,
    alpha: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    activation: str | None,
    residual: Tensor | None,
    channels_last: bool,
) -> Tensor:
    """Return activation(function(alpha * x + shift) * weight + bias + residual), of x (..., C) or (N, C, ...).

    The loops take two passes, forward and backward, each as a batch norm's evaluation: with alpha for the weight and
    tanh for the activation, and with gamma and beta. They have no error function; what follows it they compute where
    no half precision would be rounded in between. What is compiled or exported is made of operators, which compilers
    fuse to one pass.
    """
    recorded = torch.compiler.is_compiling() or is_exporting()
    if requested() == "native" and (recorded or function == "erf"):
        refuse_loops("there are none for compiled code here" if recorded else "there are none for the error function")
    if not recorded and (x.is_contiguous() or not channels_last or requested() == "native"):
        rows, beside = (_as_rows(t, weight) if channels_last else t for t in (x, residual))
        y = _squashed_by_loops(rows, function, alpha, shift, weight.flatten(), bias.flatten(), activation, beside)
        if y is not None:
            return y.view(x.shape) if channels_last else y
    wide = reference.working_dtype(x) if requested() == "reference" else masked.statistics_dtype(x)
    shape = weight.shape if channels_last else (1, -1, *(1,) * (x.dim() - 2))
    y = by_operators(x, function, alpha, shift, wide) * weight.to(wide).reshape(shape)
    return reference.finish(y, bias.to(wide).reshape(shape), residual, activation).to(x.dtype)


def _as_rows(t: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if t is None else t.reshape(-1, weight.numel())


def _squashed_by_loops(
    x: Any,
    function: Function,
    alpha: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor | None:
    """As `squashed`, of x (N, C, ...); None if the loops cannot."""
    if not _restores_in_loops(x, activation, weight, bias, residual):
        return None
    if function == "tanh" and _restores_in_loops(x, "tanh", weight):
        # In no less than float32, or the sum over the channels of what is alpha's gradient would be rounded.
        own = alpha.to(torch.promote_types(alpha.dtype, torch.float32)).expand(x.shape[1])
        y = restored(x, "tanh", own, None)
    elif masked.statistics_dtype(x) is x.dtype:
        y = by_operators(x, function, alpha, shift, x.dtype)
    else:
        return None
    return restored(y, activation, weight, bias, residual)


def restored(
    x: Tensor, activation: str | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """Return activation(x * weight + bias + residual), with one weight and bias per channel of x, (N, C, ...)."""
    channels, rank = x.shape[1], x.dim()
    neutral = Moments(x.new_zeros(channels, dtype=torch.float32), x.new_ones(channels, dtype=torch.float32), 0)
    recipe = Recipe((0, *range(2, rank)), 0.0, activation, True, (1, channels, *(1,) * (rank - 2)))
    return normalize_stored(x, recipe, neutral, weight, bias, residual)


def _restores_in_loops(
    x: Tensor, activation: str | None, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> bool:
    over, parameters = (0, *range(2, x.dim())), (1, x.shape[1], *(1,) * (x.dim() - 2))
    return plan_for(x, Recipe(over, 0.0, activation, True, parameters), weight, bias, residual) is not None


def by_operators(x: Tensor, function: Function, alpha: Tensor, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return function(alpha * x + shift), computed and returned in this type."""
    x, alpha = x.to(dtype), alpha.to(dtype)
    z = x * alpha if shift is None else x * alpha + shift.to(dtype)
    if is_plain(z) and not z.requires_grad:  # in memory that nobody else has seen
        return z.tanh_() if function == "tanh" else z.erf_()
    return z.tanh() if function == "tanh" else z.erf()
