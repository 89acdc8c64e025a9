"""Plain torch, on any device: what every faster kernel must agree with.

Shapes follow one convention. `over` names the dimensions that share statistics; statistics keep those dimensions
with size 1; weight, bias and mask broadcast against x. Batch, instance, group and layer normalization differ in nothing
else, and root-mean-square normalization only in not subtracting the mean.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.activations import ACTIVATIONS
from normkit.affine import scale_shift
from normkit.moments import Moments
from normkit.tracing import is_exporting


class Recipe(NamedTuple):
    """What a normalization is, apart from its tensors."""

    over: tuple[int, ...]
    eps: float
    activation: str | None = None
    centred: bool = True  # False: about zero, not about the mean
    parameters: tuple[int, ...] | None = None  # the shape in which weight and bias broadcast; None: the one they have

    def view(self, parameter: Tensor | None) -> Tensor | None:
        """A weight, a bias or a statistic, as it broadcasts against x."""
        return parameter if parameter is None or self.parameters is None else parameter.reshape(self.parameters)


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
    # The mask is the same for all channels: it is counted as it is, not as it broadcasts.
    return mask.sum(over, keepdim=True) * prod([x.shape[d] for d in over if mask.shape[d] == 1])


def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None, centred: bool = True) -> Moments:
    """Mean and biased variance over the dimensions `over`, of the positions where `mask` is true.

    Sums are taken about a first estimate of the mean: however far the values lie from zero, nothing cancels.
    Not centred, the mean is zero and the variance is the mean square.
    """
    x = _masked(x.to(working_dtype(x)), mask)
    count = count_values(x, over, mask)
    n = count.clamp(min=1) if isinstance(count, Tensor) else count
    if not centred:
        var = x.square().sum(over, keepdim=True) / n
        return Moments(torch.zeros_like(var), var, count)
    shift = x.detach().sum(over, keepdim=True) / n
    gap = _masked(x - shift, mask).sum(over, keepdim=True) / n
    # Infinity makes the gap NaN; the mean is then the infinity that plain averaging gives.
    mean = shift + gap.nan_to_num(nan=0.0)
    var = _masked(x - mean, mask).square().sum(over, keepdim=True) / n
    return Moments(mean, var, count)


def without(over: tuple[int, ...], kept: Moments) -> Moments:
    """Return moments that kept the dimensions `over` without them."""
    mean, var, count = kept
    if isinstance(count, Tensor) and count.dim() > 0:  # else a number, or one in a graph being traced
        count = count.expand(mean.shape)
    for d in reversed(over):  # one by one: an exporter knows no other way
        mean, var = mean.squeeze(d), var.squeeze(d)
        if isinstance(count, Tensor) and count.dim() == mean.dim() + 1:
            count = count.squeeze(d)
    return Moments(mean, var, count)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    recipe: Recipe,
) -> tuple[Tensor, Moments]:
    """Return activation((x - mean) / sqrt(var + eps) * weight + bias + residual) and the moments it used."""
    wide = x.to(working_dtype(x))  # once: two casts would round the two parts of the gradient apart
    m = moments(wide, recipe.over, mask, recipe.centred)
    return normalize_with(wide, m, weight, bias, residual, recipe).to(x.dtype), m


def normalize_with(
    wide: Tensor, m: Moments, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, recipe: Recipe
) -> Tensor:
    """Return what `normalize` does, with these moments and in the type of `wide`."""
    scale, _ = scale_shift(m, weight, None, recipe.eps)
    return finish((wide - m.mean) * scale, bias, residual, recipe.activation)


def normalize_stored(
    x: Tensor, recipe: Recipe, stored: Moments, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return what `normalize` does, with statistics that are already known; all are viewed as the recipe says."""
    wide = working_dtype(x)
    mean, var, weight, bias = (recipe.view(t) for t in (stored.mean, stored.var, weight, bias))
    assert mean is not None
    assert var is not None
    scale, shift = scale_shift(Moments(mean.to(wide), var.to(wide), stored.count), weight, bias, recipe.eps)
    return transform(x, scale, shift, residual, recipe.activation)


def transform(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """Return activation(x * scale + shift + residual): normalization with statistics that are already known."""
    return finish(x.to(working_dtype(x)) * scale, shift, residual, activation).to(x.dtype)


def finish(z: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    """Return activation(z + bias + residual), of the parts that are given."""
    if bias is not None:
        z = z + bias
    if residual is not None:
        z = z + residual
    return z if activation is None else ACTIVATIONS[activation].function(z)


class Backward(NamedTuple):
    """The two halves of a gradient: what is summed, and by what the sums are then spread over x.

    A collective between the halves makes the gradient that of a batch spread over ranks.
    """

    xhat: Tensor
    dz: Tensor  # gradient of what enters the activation
    g: Tensor  # gradient of xhat
    inverse_std: Tensor

    @staticmethod
    def of(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        m: Moments,
        recipe: Recipe,
    ) -> Backward:
        """Everything elementwise, before any sum."""
        inverse_std, _ = scale_shift(m, None, None, recipe.eps)
        xhat = (x.to(m.mean.dtype) - m.mean) * inverse_std
        dz = dy.to(m.mean.dtype)
        if recipe.activation is not None:
            z = xhat if weight is None else xhat * weight
            dz = dz * ACTIVATIONS[recipe.activation].slope(finish(z, bias, residual, None))
        return Backward(xhat, dz, dz if weight is None else dz * weight, inverse_std)

    def sums(self, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The two sums that carry the gradient through mean and variance."""
        return self.g.sum(over, keepdim=True), (self.g * self.xhat).sum(over, keepdim=True)

    def dx(self, sums: tuple[Tensor, Tensor], count: int | Tensor, mask: Tensor | None, centred: bool) -> Tensor:
        """The gradient of x:  (g - sum(g) / n - xhat * sum(g * xhat) / n) / sqrt(var + eps).

        The statistics enter the output of every position, but only positions that the mask counts enter them.
        """
        n = count.clamp(min=1) if isinstance(count, Tensor) else count
        through = sums[1] / n * self.xhat
        if centred:
            through = through + sums[0] / n
        return (self.g - _masked(through, mask)) * self.inverse_std

    def dweight(self, weight: Tensor | None) -> Tensor | None:
        """The gradient of the weight, in its shape and type."""
        return None if weight is None else (self.dz * self.xhat).sum_to_size(weight.shape).to(weight.dtype)

    def dbias(self, bias: Tensor | None) -> Tensor | None:
        """The gradient of the bias, in its shape and type."""
        return None if bias is None else self.dz.sum_to_size(bias.shape).to(bias.dtype)


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    recipe: Recipe,
    wants_dresidual: bool,
    m: Moments | None = None,
    stored: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and residual; without moments, from those of x itself.

    Through statistics that are stored, no gradient flows.
    """
    if m is None:
        m = moments(x, recipe.over, mask, recipe.centred)
    back = Backward.of(dy, x, weight, bias, residual, m, recipe)
    dx = back.g * back.inverse_std if stored else back.dx(back.sums(recipe.over), m.count, mask, recipe.centred)
    dresidual = back.dz.to(dy.dtype) if wants_dresidual else None
    return dx.to(x.dtype), back.dweight(weight), back.dbias(bias), dresidual


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
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute as `normalize` does; mean and variance come along, not differentiable."""
        y, m = normalize(x, weight, bias, residual, mask, recipe)
        return y, m.mean, m.var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the input and its statistics; the rest is computed again."""
        x, weight, bias, residual, mask, ctx.recipe = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        if ctx.recipe.activation is None:
            residual = None  # its gradient is dy, whatever its value
        ctx.save_for_backward(x, weight, bias, residual, mask, mean, var)
        ctx.save_for_forward(x, weight, bias, residual, mask, mean, var)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, residual, mask, mean, var = ctx.saved_tensors
        # To be differentiated again, the statistics must be functions of x.
        m = None if torch.is_grad_enabled() else Moments(mean, var, count_values(x, ctx.recipe.over, mask))
        wants = ctx.needs_input_grad[3]
        return (*gradients(grads[0], x, weight, bias, residual, mask, ctx.recipe, wants, m), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
        """Forward mode: the change of y along the changes of x, weight, bias and residual."""
        x, weight, bias, residual, mask, *_ = ctx.saved_tensors
        dx, dweight, dbias, dresidual, *_ = tangents
        over, eps, activation, centred, _ = ctx.recipe
        m = moments(x, over, mask, centred)
        n = m.count.clamp(min=1) if isinstance(m.count, Tensor) else m.count
        inverse_std, _ = scale_shift(m, None, None, eps)
        xhat = (x.to(m.mean.dtype) - m.mean) * inverse_std
        dz = torch.zeros_like(xhat)
        if dx is not None:
            du = dx.to(xhat.dtype) * inverse_std
            dxhat = du - xhat * (_masked(du * xhat, mask).sum(over, keepdim=True) / n)
            if centred:
                dxhat = dxhat - _masked(du, mask).sum(over, keepdim=True) / n
            dz = dz + (dxhat if weight is None else dxhat * weight)
        if dweight is not None:
            dz = dz + xhat * dweight
        dz = finish(dz, dbias, dresidual, None)
        if activation is not None:
            z = finish(xhat if weight is None else xhat * weight, bias, residual, None)
            dz = dz * ACTIVATIONS[activation].slope(z)
        return dz.to(x.dtype), None, None


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask, values, 0)
