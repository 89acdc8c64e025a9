"""Torch's own fused operators with our options around them, in as few passes over memory as torch's own layers take.

Statistics are float32, or float64 for float64 input, whatever the type of the parameters; results have the input's
type. What an operator returns is added to and activated where it lies: no backward of theirs needs the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from normkit.activations import ACTIVATIONS, LEAKY_SLOPE
from normkit.affine import scale_shift
from normkit.kernels import masked
from normkit.kernels.masked import statistics_dtype
from normkit.kernels.reference import Recipe, count_values, working_dtype
from normkit.moments import Moments
from normkit.tracing import is_transformed_or_dual

Kind = Literal["batch", "positions", "groups", "last", "maps"]

_LEAST_WEIGHT = 1e-3  # below this, too little of the input is left in the output to be worked out again
_UPDATES_STATISTICS = ("cpu", "cuda")  # devices that have aten::batch_norm_update_stats

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _outside_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Autocast would cast a half precision input up as a whole, and return float32; ours has the type of the input."""

    @wraps(function)
    def run(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        device = cast(Tensor, args[0]).device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return run


def kind_of(x: Tensor, recipe: Recipe) -> Kind | None:
    """Return which of torch's operators computes a recipe, or None."""
    over, rank = recipe.over, x.dim()
    if recipe.centred and rank > 1 and over == (0, *range(2, rank)):
        return "batch"
    if recipe.centred and rank > 2 and over == (0,):
        return "positions"
    if over != tuple(range(over[0], rank)):
        return None
    if recipe.parameters is None:
        return "last"
    if over[0] == 2:
        return "groups" if recipe.centred else "maps"
    return None


def why_not(x: Tensor, recipe: Recipe, mask: Tensor | None = None) -> str | None:
    """Return why torch has nothing for a call, or None if it has."""
    if mask is not None and is_transformed_or_dual():
        return "a mask inside a transform of torch.func"
    if kind_of(x, recipe) is None or (mask is not None and not recipe.centred):
        return f"statistics over the dimensions {recipe.over} of {x.dim()}"
    return None


# ---- what is called


@_outside_autocast
def normalize(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Moments]:
    """As `select.normalize`. Moments take a pass of their own only for norms about zero, and in transforms."""
    if mask is not None:
        z, m = masked.normalize(x, recipe.view(weight), recipe.view(bias), mask, recipe)
        return finish(z, residual, recipe.activation), m
    kind, n = kind_of(x, recipe), cast(int, count_values(x, recipe.over))
    if kind == "groups":
        return _group_norm(x, recipe, weight, bias, residual)
    if kind == "last" and recipe.centred:
        return _layer_norm(x, recipe, weight, bias, residual)
    if kind in ("last", "maps"):
        var = torch.linalg.vector_norm(x.detach(), 2, recipe.over, dtype=statistics_dtype(x))
        var = var.to(working_dtype(x)).square() / max(n, 1)
        return normalized(x, recipe, weight, bias, residual), Moments(torch.zeros_like(var), var, n)
    if is_transformed_or_dual():  # the operator could not write to buffers of which a transform knows nothing
        return normalized(x, recipe, weight, bias, residual), moments(x.detach(), recipe.over)
    features = x.shape[1:2] if kind == "batch" else x.shape[1:]
    mean, unbiased = (x.new_zeros(features, dtype=statistics_dtype(x)) for _ in range(2))
    y = _batch_norm(x, recipe, weight, bias, residual, inplace, mean, unbiased, 1.0)
    return y, _biased(x, mean, unbiased, n)


@_outside_autocast
def normalized(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `normalize` without a mask, and without the moments."""
    kind = kind_of(x, recipe)
    if kind in ("batch", "positions"):
        return _batch_norm(x, recipe, weight, bias, residual)
    if kind == "groups":
        return _group_norm(x, recipe, weight, bias, residual)[0]
    if kind == "last" and recipe.centred:
        return _layer_norm(x, recipe, weight, bias, residual)[0]
    if kind == "maps":
        z = _rms_norm(x.flatten(2), (prod(x.shape[2:]),), None, recipe.eps).unflatten(2, x.shape[2:])
        return finish(affine(z, recipe.view(weight), recipe.view(bias)), residual, recipe.activation)
    shape = x.shape[recipe.over[0] :]
    z = _rms_norm(x, shape, weight if weight is None else weight.expand(shape), recipe.eps)
    return finish(affine(z, None, bias), residual, recipe.activation)


@_outside_autocast
def normalize_stored(
    x: Tensor, recipe: Recipe, stored: Moments, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """As `select.normalize_stored`.

    Statistics with a gradient go round the operator, which would drop it, and those of each example, which it lacks.
    """
    own = statistics_dtype(x)
    mean, var = _to(stored.mean, own), _to(stored.var, own)
    weight, bias = _beside(weight, bias, own)
    needs_grad = torch.is_grad_enabled() and (mean.requires_grad or var.requires_grad)
    if needs_grad or recipe.over[0] != 0 or is_transformed_or_dual():
        shape = [1 if d in recipe.over else n for d, n in enumerate(x.shape)]
        known = Moments(mean.reshape(shape), var.reshape(shape), 0)
        scale, shift = scale_shift(known, recipe.view(weight), recipe.view(bias), recipe.eps)
        return finish(torch.addcmul(shift, x.to(own), scale).to(x.dtype), residual, recipe.activation)
    flat = x
    if mean.dim() > 1:  # statistics of each position on its own
        flat, residual = x.flatten(1), None if residual is None else residual.flatten(1)
        weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
        mean, var = mean.flatten(), var.flatten()
    z = torch.batch_norm(flat, weight, bias, mean, var, False, 0.0, recipe.eps, torch.backends.cudnn.enabled)
    y = finish(z, residual, recipe.activation)
    return y if flat is x else y.view(x.shape)


@_outside_autocast
def normalize_and_update_(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    momentum: float | Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    inplace: bool,
) -> Tensor | None:
    """As `select.normalize_and_update_`: the operator moves statistics of its own type, and no others."""
    mean, var, count = stored
    own = statistics_dtype(x)
    if is_transformed_or_dual() or not (mean.dtype is var.dtype is own) or mean.requires_grad or var.requires_grad:
        return None
    if not (mean.is_contiguous() and var.is_contiguous()):
        return None
    number = count if momentum is None else momentum
    if isinstance(number, Tensor) and (number.is_meta or torch.compiler.is_compiling()):
        return None
    # None: a plain average over the batches counted.
    momentum = 1 / (int(count) + 1) if momentum is None else float(momentum)
    y = _batch_norm(x, recipe, weight, bias, residual, inplace, mean, var, momentum)
    if isinstance(count, Tensor):
        count.add_(1)
    return y


@_outside_autocast
def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None) -> Moments:
    """Moments of x without the dimensions `over`; with a gradient, where x has one and there is no mask."""
    mean, var, n = _moments(x, over) if mask is None else masked.statistics(x, over, mask)
    return Moments(mean.to(working_dtype(x)), var.to(working_dtype(x)), n)


def _moments(x: Tensor, over: tuple[int, ...]) -> Moments:
    own, n = statistics_dtype(x), cast(int, count_values(x, over))
    if x.numel() == 0:
        unknown = x.new_full([size for d, size in enumerate(x.shape) if d not in over], torch.nan, dtype=own)
        return Moments(unknown, unknown, n)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    is_batch = x.dim() > 1 and over == (0, *range(2, x.dim()))
    if is_batch and n > 1 and not needs_grad and not is_transformed_or_dual():
        return Moments(*_batch_statistics(x), n)
    var, mean = torch.var_mean(x.to(own), over, correction=0)
    return Moments(mean, var, n)


# ---- the operators


def _batch_norm(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    inplace: bool = False,
    mean: Tensor | None = None,
    unbiased: Tensor | None = None,
    momentum: float = 0.0,
) -> Tensor:
    """Normalize with the batch's statistics; move mean and unbiased variance, where given, towards them."""
    weight, bias = _beside(weight, bias, statistics_dtype(x))
    per_channel = kind_of(x, recipe) == "batch"
    if inplace and residual is None and per_channel and is_invertible(recipe, weight):
        return cast(Tensor, InPlace.apply(x, weight, bias, recipe, mean, unbiased, momentum))
    flat = x
    if not per_channel:
        flat = x.flatten(1)
        residual = None if residual is None else residual.flatten(1)
        weight, bias, mean, unbiased = (t if t is None else t.reshape(-1) for t in (weight, bias, mean, unbiased))
    z = torch.batch_norm(flat, weight, bias, mean, unbiased, True, momentum, recipe.eps, torch.backends.cudnn.enabled)
    y = finish(z, residual, recipe.activation)
    return y if flat is x else y.view(x.shape)


def _group_norm(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    if x.shape[2] == 1 and x.numel() > 0 and not is_transformed_or_dual():
        return _instance_norm(x, recipe, weight, bias, residual)
    flat, beside = x.flatten(1, 2), None if residual is None else residual.flatten(1, 2)
    # As torch's own group_norm does. In a transform, a batch of tensors cannot tell whether it is channels_last; and a
    # backward of the parameters alone ends the process there (torch 2.13).
    has_layout = flat.is_cpu and (flat.requires_grad or not torch.is_grad_enabled()) and not is_transformed_or_dual()
    flat = flat.contiguous(memory_format=suggest_memory_format(flat) if has_layout else torch.contiguous_format)
    examples, channels = flat.shape[:2]
    own, size = _own(x, weight, bias, (channels,)), prod(flat.shape[2:])
    z, mean, rstd = torch.native_group_norm(flat, *own, examples, channels, size, x.shape[1], recipe.eps)
    y = finish(z, beside, recipe.activation).unflatten(1, x.shape[1:3])
    return y, _moments_of(x, recipe, mean, rstd)


def _instance_norm(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    """Groups of one channel, as torch has them: a batch of one example with as many channels as all examples have."""
    examples, channels = x.shape[:2]
    own, n = statistics_dtype(x), cast(int, count_values(x, recipe.over))
    weight, bias = (t if t is None else t.repeat(examples) for t in _beside(weight, bias, own))
    mean, unbiased = (x.new_zeros(examples * channels, dtype=own) for _ in range(2))
    flat = x.reshape(1, examples * channels, n)
    z = torch.batch_norm(flat, weight, bias, mean, unbiased, True, 1.0, recipe.eps, torch.backends.cudnn.enabled)
    beside = None if residual is None else residual.reshape(flat.shape)
    y = finish(z, beside, recipe.activation).view(x.shape)
    return y, _biased(x, mean.view(examples, channels), unbiased.view(examples, channels), n)


def _layer_norm(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    shape = x.shape[recipe.over[0] :]
    weight, bias = (t if t is None or t.shape == shape else t.expand(shape) for t in (weight, bias))
    z, mean, rstd = torch.native_layer_norm(x, shape, *_own(x, weight, bias, shape), recipe.eps)
    return finish(z, residual, recipe.activation), _moments_of(x, recipe, mean, rstd)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    if x.is_cpu and x.itemsize == 2:  # as torch itself does there; but it would not take a float32 weight
        return torch.rms_norm(x.float(), shape, _to(weight, torch.float32), eps).to(x.dtype)
    return torch.rms_norm(x, shape, _to(weight, x.dtype), eps)


def _own(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Parameters as the operators within an example take them: in float32 on CPUs, elsewhere in the input's type."""
    dtype = statistics_dtype(x) if x.is_cpu else x.dtype
    if weight is None and dtype is not x.dtype:  # without any, the statistics of half precision would be in half
        weight = x.new_ones(tuple(shape), dtype=dtype)
    return _beside(weight, bias, dtype)


def _beside(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Parameters in this type, and a weight beside every bias.

    Alone, group_norm does not take one, and batch_norm and layer_norm have wrong second derivatives (torch 2.13).
    """
    bias = _to(bias, dtype)
    return torch.ones_like(bias) if weight is None and bias is not None else _to(weight, dtype), bias


def _moments_of(x: Tensor, recipe: Recipe, mean: Tensor, rstd: Tensor) -> Moments:
    kept = [n for d, n in enumerate(x.shape) if d not in recipe.over]
    mean, rstd = (t.detach().to(working_dtype(x)).reshape(kept) for t in (mean, rstd))
    var = (rstd.square().reciprocal() - recipe.eps).clamp(min=0)
    return Moments(mean, var, cast(int, count_values(x, recipe.over)))


def _biased(x: Tensor, mean: Tensor, unbiased: Tensor, n: int) -> Moments:
    """Moments from what a batch norm with momentum 1 has stored, in the type that moments have on this device."""
    own = working_dtype(x)
    var = unbiased.to(own) * ((n - 1) / n) if n > 1 else torch.zeros_like(unbiased, dtype=own)
    return Moments(mean.to(own), var, n)


def _batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in one pass that only reads."""
    own = statistics_dtype(x)
    if x.device.type not in _UPDATES_STATISTICS:
        var, mean = torch.var_mean(x.to(own), (0, *range(2, x.dim())), correction=0)
        return mean, var
    channels = x.shape[1:2]
    buffers = x.new_zeros(channels, dtype=own), x.new_zeros(channels, dtype=own)  # without them, half stays half
    mean, var = torch.ops.aten.batch_norm_update_stats(x.detach(), *buffers, 1.0)
    return mean, var


def affine(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return z * weight + bias, of the parts that are given, in the type of z."""
    if weight is None:
        return z if bias is None else (z + bias).to(z.dtype)
    return (z * weight if bias is None else torch.addcmul(bias, z, weight)).to(z.dtype)


@overload
def _to(t: Tensor, dtype: torch.dtype) -> Tensor: ...


@overload
def _to(t: None, dtype: torch.dtype) -> None: ...


@overload
def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or t.dtype is dtype else t.to(dtype)


_FROM_OUTPUT: dict[str, Callable[[Tensor], Tensor]] = {  # whose gradient can be told from what comes out
    "relu": torch.relu_,
    "leaky_relu": lambda z: F.leaky_relu_(z, LEAKY_SLOPE),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


def finish(z: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """Return activation(z + residual) in the type of z, over the memory of z wherever autograd allows it."""
    is_owned = not is_transformed_or_dual()
    if residual is not None:
        z = z.add_(residual) if is_owned else (z + residual).to(z.dtype)
    if activation is None:
        return z
    if is_owned and activation in _FROM_OUTPUT:
        return _FROM_OUTPUT[activation](z)
    if is_owned and activation == "silu" and not z.requires_grad:
        return F.silu(z, inplace=True)
    return ACTIVATIONS[activation].function(z)


# ---- in place


def is_invertible(recipe: Recipe, weight: Tensor | None) -> bool:
    """Whether the input can be worked out from the output."""
    if recipe.activation not in (None, "leaky_relu") or is_transformed_or_dual():
        return False
    return weight is None or weight.numel() == 0 or bool(weight.detach().abs().min() >= _LEAST_WEIGHT)


class InPlace(torch.autograd.Function):
    """Batch normalization into the input's own memory, which is all that is kept (Rota Bulo et al. 2018).

    The backward is torch's, of z, what entered the activation, instead of x: (z - bias) / weight is the same xhat.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        recipe: Recipe,
        stored_mean: Tensor | None,
        stored_var: Tensor | None,
        momentum: float,
    ) -> Tensor:
        """Return the input, overwritten; mean and unbiased variance, where given, are moved."""
        mean, var = _batch_statistics(x)
        n = x.numel() // max(1, mean.numel())
        if stored_mean is not None and stored_var is not None:
            stored_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            stored_var.mul_(1 - momentum).add_(var, alpha=momentum * n / (n - 1))
        scale, shift = scale_shift(Moments(mean, var, n), weight, bias, recipe.eps)
        view = (1, -1, *(1,) * (x.dim() - 2))
        torch.addcmul(shift.view(view), x, scale.view(view), out=x)
        if recipe.activation is not None:
            F.leaky_relu_(x, LEAKY_SLOPE)
        ctx.recipe = recipe
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, (var + recipe.eps).rsqrt())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        y, weight, bias, inverse_std = ctx.saved_tensors
        dz, z = grads[0], y
        if ctx.recipe.activation is not None:
            dz = torch.ops.aten.leaky_relu_backward(dz, y, LEAKY_SLOPE, True)
            z = F.leaky_relu(y, 1 / LEAKY_SLOPE)
        plain = torch.ones_like(inverse_std) if weight is None else weight
        centre = torch.zeros_like(inverse_std) if bias is None else bias
        wants = [ctx.needs_input_grad[0], weight is not None, bias is not None]
        # It returns (...) * save_invstd * weight: of its two factors one must be 1 / weight, to give xhat.
        found = torch.ops.aten.native_batch_norm_backward(
            dz, z, plain.square() * inverse_std, None, None, centre, plain.reciprocal(), True, 0.0, wants
        )
        return (*(g if wanted else None for g, wanted in zip(found, wants, strict=True)), None, None, None, None)
