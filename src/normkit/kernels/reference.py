"""Plain torch, on any device: what every faster kernel must agree with.

Shapes follow one convention. `over` names the dimensions that share statistics; statistics keep those dimensions
with size 1; weight, bias and mask broadcast against x. Batch, instance, group and layer normalization differ in nothing
else.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from normkit.activations import ACTIVATIONS
from normkit.affine import scale_shift
from normkit.kernels.context import is_exporting
from normkit.moments import Moments


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the type to compute in: on CPUs float64, so that only the last rounding shows; else at least float32.

    Other devices, and the runtimes that exported graphs go to, may be slow in float64 or lack it.
    """
    if x.device.type in ("cpu", "meta") and not is_exporting():
        return torch.float64
    return torch.promote_types(x.dtype, torch.float32)


def count_values(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None) -> int | Tensor:
    """Return how many values each statistic is made of."""
    if mask is None:
        return prod([x.shape[d] for d in over])
    return mask.expand(x.shape).sum(over, keepdim=True)


def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None) -> Moments:
    """Mean and biased variance over the dimensions `over`, of the positions where `mask` is true.

    Sums are taken about a first estimate of the mean: however far the values lie from zero, nothing cancels.
    """
    x = x.to(working_dtype(x))
    x = _masked(x, mask)
    count = count_values(x, over, mask)
    shift = x.detach().sum(over, keepdim=True) / count
    gap = _masked(x - shift, mask).sum(over, keepdim=True) / count
    # Infinity makes the gap NaN; the mean is then the infinity that plain averaging gives.
    mean = shift + gap.nan_to_num(nan=0.0)
    var = _masked(x - mean, mask).square().sum(over, keepdim=True) / count
    return Moments(mean, var, count)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    over: tuple[int, ...],
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Moments]:
    """Return activation((x - mean) / sqrt(var + eps) * weight + bias + residual) and the moments it used."""
    wide = x.to(working_dtype(x))  # once: two casts would round the two parts of the gradient apart
    m = moments(wide, over, mask)
    scale, _ = scale_shift(m, weight, None, eps)
    z = (wide - m.mean) * scale
    return _finish(z, bias, residual, activation).to(x.dtype), m


def transform(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """Return activation(x * scale + shift + residual): normalisation with statistics that are already known."""
    return _finish(x.to(working_dtype(x)) * scale, shift, residual, activation).to(x.dtype)


class Normalize(torch.autograd.Function):
    """`normalize` with the analytic gradient (Ioffe & Szegedy 2015, section 3), differentiable once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        over: tuple[int, ...],
        eps: float,
        activation: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute as `normalize` does; mean and variance come along, not differentiable."""
        y, m = normalize(x, weight, bias, residual, mask, over, eps, activation)
        return y, m.mean, m.var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the input and its statistics; the rest is computed again."""
        x, weight, bias, residual, mask, ctx.over, ctx.eps, ctx.activation = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        if ctx.activation is None:
            residual = None  # its gradient is dy, whatever its value
        ctx.save_for_backward(x, weight, bias, residual, mask, mean, var)
        ctx.save_for_forward(x, weight, bias, residual, mask, mean, var)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, residual, mask, mean, var = ctx.saved_tensors
        m = Moments(mean, var, count_values(x, ctx.over, mask))
        if torch.is_grad_enabled():  # to be differentiated again, the statistics must be functions of x
            m = moments(x, ctx.over, mask)
        dx, dweight, dbias, dz = _gradients(
            grads[0], x, weight, bias, residual, mask, m, ctx.over, ctx.eps, ctx.activation
        )
        dresidual = dz.to(grads[0].dtype) if ctx.needs_input_grad[3] else None
        return dx, dweight, dbias, dresidual, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
        """Forward mode: the change of y along the changes of x, weight, bias and residual."""
        x, weight, bias, residual, mask, *_ = ctx.saved_tensors
        dx, dweight, dbias, dresidual, *_ = tangents
        m = moments(x, ctx.over, mask)
        inverse_std, _ = scale_shift(m, None, None, ctx.eps)
        xhat = (x.to(m.mean.dtype) - m.mean) * inverse_std
        dz = torch.zeros_like(xhat)
        if dx is not None:
            du = dx.to(xhat.dtype) * inverse_std
            mean_change = _masked(du, mask).sum(ctx.over, keepdim=True) / m.count
            std_change = _masked(du * xhat, mask).sum(ctx.over, keepdim=True) / m.count
            dxhat = du - mean_change - xhat * std_change
            dz = dz + (dxhat if weight is None else dxhat * weight)
        if dweight is not None:
            dz = dz + xhat * dweight
        dz = _finish(dz, dbias, dresidual, None)
        if ctx.activation is not None:
            z = _finish(xhat if weight is None else xhat * weight, bias, residual, None)
            dz = dz * ACTIVATIONS[ctx.activation].slope(z)
        return dz.to(x.dtype), None, None


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    m: Moments,
    over: tuple[int, ...],
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of x, weight, bias and of the sum that enters the activation.

    With g = dy * weight:  dx = (g - mean(g) - xhat * mean(g * xhat)) / sqrt(var + eps)
    Every position's output feels the statistics; only those that the mask counts have made them.
    """
    inverse_std, _ = scale_shift(m, None, None, eps)
    xhat = (x.to(m.mean.dtype) - m.mean) * inverse_std
    dz = dy.to(m.mean.dtype)
    if activation is not None:
        z = xhat if weight is None else xhat * weight
        dz = dz * ACTIVATIONS[activation].slope(_finish(z, bias, residual, None))
    g = dz if weight is None else dz * weight
    through_mean = g.sum(over, keepdim=True) / m.count
    through_var = (g * xhat).sum(over, keepdim=True) / m.count * xhat
    dx = (g - _masked(through_mean + through_var, mask)) * inverse_std
    dweight = None if weight is None else (dz * xhat).sum_to_size(weight.shape).to(weight.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dx.to(x.dtype), dweight, dbias, dz


def _finish(z: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        z = z + bias
    if residual is not None:
        z = z + residual
    return z if activation is None else ACTIVATIONS[activation].function(z)


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, 0)
