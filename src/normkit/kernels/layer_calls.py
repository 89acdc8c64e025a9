"""Calls of layers without options: with a small tensor, deciding what to do takes most of the time.

None leaves a call, and any error in it, to the general way (`select`). The callers know that x is a plain tensor and
that nothing is being compiled, recorded or watched (`is_plain`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import added, autograd, core, native, plans, straight
from normkit.kernels.maps import as_rows
from normkit.kernels.plans import Plan
from normkit.kernels.select import requested_eagerly
from normkit.tracing import is_recomputing

SMALL = {
    "channel": 64,  # of a channel, in so few examples:
    "examples": 4,
    "instances": 1 << 12,
    "groups": 1 << 20,
    "groups, cut off": 1 << 18,  # by ReLU, which costs our loops nothing
    "last": 1 << 20,
    "last, trained": 1 << 10,  # by the operator for groups: see `straight.layer_norm_as_groups`
    "of examples": 1 << 14,  # with parameters of each example, which take torch a pass of their own
    "line": 512,  # of the values that share statistics, whatever their number in all
    "sum": 1 << 17,  # that is normalized: added by torch, and not in the pass of our loops
}
"""Up to this many values torch's operator is the faster on CPUs, in float32 on contiguous memory: its call is shorter,
and its loops for layers and groups are good. Measured by benchmarks/bench_crossover.py."""


def _goes_straight(x: Tensor, is_small: bool = False) -> bool:
    """Whether a layer's call goes to torch's operator without further questions: small ones, and off CPUs all."""
    asked = requested_eagerly()
    return asked == "torch" or (asked == "auto" and (is_small or not x.is_cpu or core.WHY_NOT is not None))


def _has_few_values(x: Tensor, activation: str | None) -> bool:
    """Whether a batch has so few values of each channel that what our loops do once per channel takes most of the time.

    Not where channels lie side by side: torch sums them in an order that depends on its threads. Ours does not, and has
    them. An activation costs our loops next to nothing.
    """
    shape = x.shape
    if len(shape) < 3 or shape[0] > SMALL["examples"]:
        return False
    most = SMALL["channel"] if activation is None else SMALL["channel"] // 2
    return x.numel() <= most * shape[1] and x.is_contiguous() and x.stride()[1] != 1


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: tuple[int, ...],
    eps: float,
    activation: str | None,
    training: bool,
) -> Tensor | None:
    """A layer norm's call.

    Torch's operator sums the parameters' gradients in an order that depends on its threads. The loops do not, and have
    them, but for so few values that torch's operator for groups, which does not either, is the faster. A forward
    without a gradient in training goes the same way: activation checkpointing will repeat it with one.
    """
    is_trained = (training or torch.is_grad_enabled()) and (
        (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    )
    is_of_examples = weight is not None and weight.dim() > len(normalized)
    is_small = x.numel() < SMALL["of examples" if is_of_examples else "last"]
    if not is_of_examples:
        is_small = is_small or prod(normalized) < SMALL["line"]
    if _goes_straight(x, is_small and not is_trained):
        straight_call = straight.layer_norm_of_examples if is_of_examples else straight.layer_norm_call
        y = straight_call(x, weight, bias, normalized, eps, activation)
        if y is not None:
            return y
    elif is_trained and _goes_straight(x, x.numel() <= SMALL["last, trained"]):
        y = straight.layer_norm_as_groups(x, weight, bias, normalized, eps, activation)
        if y is not None:
            return y
    x = as_rows(x)
    plan = _plan_of_layer(plans.of_last, x, weight, bias, normalized, eps, activation)
    return None if plan is None else autograd.call(x, weight, bias, plan)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *terms: Any) -> Tensor | None:
    """A root mean square norm's call: on CPUs torch makes it of several operators, so that the loops always win."""
    if _goes_straight(x):
        return None if bias is not None else straight.rms_norm_call(x, weight, *terms)
    x = as_rows(x)
    plan = _plan_of_layer(plans.of_last_squares, x, weight, bias, *terms)
    return None if plan is None else autograd.call(x, weight, bias, plan)


def may_be_given(t: Tensor | None) -> bool:
    """Whether the loops may read what comes with a call: a weight, a bias, or what is added before the norm."""
    return t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu)


def takes_sum(one: Tensor) -> bool:
    """Whether the loops add up what they normalize, which with few values takes longer than a pass for it alone."""
    asked = requested_eagerly()
    return asked == "native" or (asked == "auto" and one.numel() >= SMALL["sum"])


def last_norm_of_sum(
    one: Tensor,
    other: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: tuple[int, ...],
    eps: float,
    activation: str | None,
    centred: bool,
) -> tuple[Tensor, Tensor] | None:
    """The call of a layer or root mean square norm of a sum, in the pass that adds; and the sum."""
    alike = may_be_given(other) and other.dtype is one.dtype and other.shape == one.shape
    if not (alike and one.is_contiguous() and other.is_contiguous()):
        return None
    if core.WHY_NOT is not None or not one.is_cpu:
        return None
    if any(t is not None and (t.shape != normalized or not t.is_cpu) for t in (weight, bias)):
        return None
    # As if there were parameters, with or without: what is normalized then makes lines, which alone can be added up.
    own = (normalized, None, normalized, eps, activation, centred)
    plan = plans.of_last(one.dtype, one.shape, one.stride(), *own)
    return None if plan is None or plan.copy is not None else added.normalize_sum(one, other, weight, bias, plan)


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *terms: Any) -> Tensor | None:
    """A group norm's call, or an instance norm's, whose groups are single channels."""
    groups, channels, _, activation = terms
    kind = "instances"
    if groups < channels and x.dim() > 2:
        kind = "groups, cut off" if activation in ("relu", "leaky_relu") else "groups"
    if _goes_straight(x, x.numel() < SMALL[kind] and x.is_contiguous()):
        y = straight.group_norm_call(x, weight, bias, *terms)
        if y is not None:
            return y
    plan = _plan_of_layer(plans.of_groups, x, weight, bias, *terms)
    return None if plan is None else autograd.call(x, weight, bias, plan)


def batch_norm_step_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    momentum: float,
    *terms: Any,
) -> Tensor | None:
    """A batch norm's step of training, as `normalize_and_update_`."""
    if _goes_straight(x, _has_few_values(x, terms[-1])):
        if is_recomputing():  # autograd demands the same operator on the same tensors; but a batch counts once
            mean, var, count = mean.clone(), var.clone(), count.clone()
        return straight.batch_norm_step_(x, weight, bias, mean, var, count, momentum, *terms)
    plan = None if is_recomputing() else _plan_of_layer(plans.of_batch, x, weight, bias, mean.shape, *terms)
    update = None if plan is None else native.update_of(mean, var, count, momentum)
    if plan is None or update is None:
        return None
    y = autograd.call(x, weight, bias, plan, update)
    native.count_update(mean, var, count)
    return y


def batch_norm_evaluated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *terms: Any
) -> Tensor | None:
    """A batch norm's evaluation: in the loops without a gradient, in torch's operator also with one."""
    if _goes_straight(x, _has_few_values(x, terms[-1])):
        return straight.batch_norm_evaluated(x, weight, bias, mean, var, *terms)
    if torch.is_grad_enabled() or not native.is_plain_memory(mean, var):
        return None
    plan = _plan_of_layer(plans.of_batch, x, weight, bias, mean.shape, *terms)
    if plan is not None and plan.copy is None:
        return native.evaluate(x, weight, bias, None, mean, var, plan)
    if plan is not None and requested_eagerly() == "auto":  # one pass of theirs takes less time than a copy before ours
        return straight.batch_norm_evaluated(x, weight, bias, mean, var, *terms)
    return None


def _plan_of_layer(
    plan_of: Callable[..., Plan | None], x: Tensor, weight: Tensor | None, bias: Tensor | None, *terms: Any
) -> Plan | None:
    if requested_eagerly() in ("reference", "torch") or core.WHY_NOT is not None or not x.is_cpu:
        return None
    weight_shape, bias_shape = None if weight is None else weight.shape, None if bias is None else bias.shape
    return plan_of(x.dtype, x.shape, x.stride(), weight_shape, bias_shape, *terms)
