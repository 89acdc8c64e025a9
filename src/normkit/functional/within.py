"""Statistics within an example."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike, parted
from normkit.errors import ArgumentError
from normkit.functional.batch_core import (
    Terms,
    has_no_values,
    moments_of_nothing,
    normalize_nothing,
    normalize_stored,
    write_,
)
from normkit.functional.by_example import OfExamples
from normkit.kernels import by_example, maps, select
from normkit.kernels.reference import Recipe, working_dtype
from normkit.moments import Moments, ema, unbiased_var


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalize over the last dimensions, those of `normalized_shape` (Ba, Kiros & Hinton 2016).

    activation((x - mean) / sqrt(var + eps) * weight + bias + residual)
    """
    checks.options(eps, None, activation)
    act = parted(activation, negative_slope)
    shape = checks.normalized_shape(normalized_shape, "layer_norm")
    checks.one_per_channel(weight, "weight", "layer_norm", shape, "element")
    checks.one_per_channel(bias, "bias", "layer_norm", shape, "element")
    recipe = Recipe(last(input, shape), eps, act.fused)
    return act.finish(normalize_last(input, shape, weight, bias, recipe, residual))


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
) -> Tensor:
    """Divide by the root of the mean square over the last dimensions (Zhang & Sennrich 2019).

        activation(x / sqrt(mean(x^2) + eps) * weight + residual)

    As in torch, eps None is the machine epsilon of the type that torch would compute in: float32 for half precision.
    """
    checks.options(1.0 if eps is None else eps, None, activation)
    act = parted(activation, negative_slope)
    shape = checks.normalized_shape(normalized_shape, "rms_norm")
    checks.one_per_channel(weight, "weight", "rms_norm", shape, "element")
    recipe = Recipe(last(input, shape), rms_eps(input, eps), act.fused, centred=False)
    return act.finish(normalize_last(input, shape, weight, None, recipe, residual, who="rms_norm"))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize each group of channels of each example, over its positions (Wu & He 2018).

        activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    With a `mask` (N, ...), statistics are those of the positions where it is true. All positions are normalized; where
    padding is not finite, it counts as zero. An example without any such position becomes activation(bias + residual).
    """
    checks.options(eps, None, activation)
    act = parted(activation, negative_slope)
    checks.batch_input(input, "group_norm", input.shape[1:2], (max(2, input.dim()),))
    checks.groups(num_groups, input.shape[1], "group_norm")
    return act.finish(normalize_groups(input, num_groups, weight, bias, eps, act.fused, residual, mask)[0])


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize each channel of each example over its positions (Ulyanov, Vedaldi & Lempitsky 2016).

        activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    The running statistics, where given, move in place towards the average over examples of mean and unbiased
    variance; with `use_input_stats=False` they are what x is normalized with. The mask is as in `group_norm`.
    """
    checks.options(eps, momentum, activation)
    act = parted(activation, negative_slope)
    checks.batch_input(input, "instance_norm", input.shape[1:2], (max(3, input.dim()),))
    if (running_mean is None) != (running_var is None):
        raise ArgumentError("instance_norm needs both running_mean and running_var, or neither; got one of them.")
    stored = None if running_mean is None or running_var is None else Moments(running_mean, running_var, 0)
    if not use_input_stats:
        if stored is None:
            raise ArgumentError("instance_norm needs running_mean and running_var, or use_input_stats; got neither.")
        terms = Terms(stored.mean.shape, weight, bias, eps, act.fused, residual, mask, who="instance_norm")
        return act.finish(normalize_stored(input, stored, terms))
    checks.one_per_channel(running_mean, "running_mean", "instance_norm", input.shape[1:2])
    checks.one_per_channel(running_var, "running_var", "instance_norm", input.shape[1:2])
    y, own = normalize_instances(input, weight, bias, eps, act.fused, residual, mask)
    if stored is not None:
        update_(stored, own, momentum)
    return act.finish(y)


def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Divide each value by a power of the mean square of its neighbours in the channels (Krizhevsky et al. 2012).

    x / (k + alpha * mean(x^2 over `size` channels)) ** beta
    """
    checks.batch_input(input, "local_response_norm", input.shape[1:2], (max(3, input.dim()),))
    select.leave_to_reference("local response normalization")
    wide = input.to(working_dtype(input))  # once: two casts would round the two parts of the gradient apart
    positions = [0, 0] * (input.dim() - 2)
    square = torch.nn.functional.pad(wide.square(), [*positions, size // 2, (size - 1) // 2])
    near = sum((square.narrow(1, i, input.shape[1]) for i in range(1, size)), start=square.narrow(1, 0, input.shape[1]))
    return (wide / (k + alpha / size * near) ** beta).to(input.dtype)


# ---- what the layers call: three ways to normalize, and one to store statistics


def normalize_last(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    recipe: Recipe,
    residual: Tensor | None,
    who: str = "layer_norm",
) -> Tensor:
    """Normalize over the last dimensions, of the sizes `shape`; weight and bias broadcast against them.

    They may also be (N, *shape), for each example its own.
    """
    checks.last_dimensions(x, who, shape)
    checks.same_shape(residual, x, who)
    if x.dim() > len(shape):
        given = OfExamples.of(weight, bias, shape, x.shape[0], who)
        if given is not None:
            y = None if has_no_values(x) else by_example.normalize_lines(x, recipe, *given, residual)
            if y is not None:
                return y
            bare = recipe._replace(activation=None)
            z = normalize_last(x, shape, None, None, bare, None, who)
            between = (1,) * (x.dim() - 1 - len(shape))
            return given.applied(z, (x.shape[0], *between, *shape), residual, recipe.activation)
    if has_no_values(x):
        return normalize_nothing(x, recipe, weight, bias, residual)
    return select.normalized(maps.as_rows(x), recipe, weight=weight, bias=bias, residual=residual)


def normalize_channels(
    x: Tensor,
    channels: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    centred: bool,
    who: str,
) -> Tensor:
    """Normalize the channels of each position of maps, (N, C, H, W)."""
    checks.batch_input(x, who, (channels,), (4,))
    checks.same_shape(residual, x, who)
    if has_no_values(x):
        nothing = Recipe((), eps, activation, centred, (1, channels, 1, 1))
        return normalize_nothing(x, nothing, weight, bias, residual)
    recipe = Recipe((1,), eps, activation, centred)
    return maps.normalized_channels(x, recipe, weight=weight, bias=bias, residual=residual)


def normalize_groups(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    who: str = "group_norm",
) -> tuple[Tensor, Moments]:
    """Return x normalized by groups of channels, and the moments, of shape (N, G) and detached. Writes nothing.

    Weight and bias are (C,), or (N, C) for each example its own.
    """
    channels = x.shape[1]
    given = OfExamples.of(weight, bias, (channels,), x.shape[0], who)
    if given is not None:
        return _normalize_groups_of_examples(x, num_groups, given, eps, activation, residual, mask, who)
    checks.one_per_channel(weight, "weight", who, (channels,))
    checks.one_per_channel(bias, "bias", who, (channels,))
    checks.same_shape(residual, x, who)
    mask = checks.position_mask(mask, x, who)
    if mask is not None:
        # An example that is nothing but padding has no statistics, and only zero has a meaning without them.
        x = torch.where(mask.flatten(1).any(1).reshape(-1, *[1] * (x.dim() - 1)), x, 0)
        mask = mask.unsqueeze(1)
    if has_no_values(x):
        recipe = Recipe((), eps, activation, True, (1, channels, *(1,) * (x.dim() - 2)))
        return normalize_nothing(x, recipe, weight, bias, residual), moments_of_nothing((x.shape[0], num_groups), x)
    split = (num_groups, channels // num_groups)
    if prod(x.shape[2:], start=split[1]) == 1:
        # As torch, which computes bias where a group has one value, but not where that is all that a channel has.
        checks.more_than_one(x.shape[0], x, who, "group", "Use fewer groups, or larger maps.")
    recipe = Recipe(tuple(range(2, x.dim() + 1)), eps, activation, True, (1, *split, *(1,) * (x.dim() - 2)))
    residual = None if residual is None else residual.unflatten(1, split)
    y, m = select.normalize(x.unflatten(1, split), recipe, weight=weight, bias=bias, residual=residual, mask=mask)
    return y.flatten(1, 2), m


def _normalize_groups_of_examples(
    x: Tensor,
    num_groups: int,
    given: OfExamples,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    who: str,
) -> tuple[Tensor, Moments]:
    checks.same_shape(residual, x, who)
    examples, channels, *positions = x.shape
    if mask is None and x.is_contiguous() and prod(positions) > 1:
        # All groups as if of one example, which shares its parameters with no other.
        whole, beside = (None if t is None else t.reshape(1, -1, *positions) for t in (x, residual))
        weight, bias = (None if t is None else t.reshape(-1) for t in given)
        assert whole is not None
        every = examples * num_groups, weight, bias, eps, activation, beside, None, who
        y, m = normalize_groups(whole, *every)
        return y.reshape(x.shape), m._replace(mean=m.mean.view(examples, -1), var=m.var.view(examples, -1))
    z, m = normalize_groups(x, num_groups, None, None, eps, None, None, mask, who)
    return given.applied(z, (examples, channels, *(1 for _ in positions)), residual, activation), m


def normalize_instances(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    who: str = "instance_norm",
) -> tuple[Tensor, Moments]:
    """Return x normalized by channels of each example, groups of one, and the moments, of shape (N, C)."""
    remedy = "Use GroupNorm, or larger maps."
    if not has_no_values(x):
        checks.more_than_one(prod(x.shape[2:]), x, who, "example and channel", remedy)
    return normalize_groups(x, x.shape[1], weight, bias, eps, activation, residual, mask, who)


@torch.no_grad()
def update_(stored: Moments, own: Moments, momentum: float) -> None:
    """Move stored statistics, in place, towards the average of the examples' own means and unbiased variances.

    Examples that a mask leaves without a variance do not take part; without any other, nothing moves.
    """
    if not isinstance(own.count, Tensor) and own.count == 0:
        return
    mean, var = own.mean, unbiased_var(own)
    takes_part = torch.ones_like(mean, dtype=torch.bool)
    if isinstance(own.count, Tensor):
        takes_part = own.count > 1
    n = takes_part.sum(0)
    mean, var = (torch.where(takes_part, t, 0).sum(0) / n.clamp(min=1) for t in (mean, var))
    wide = stored._replace(mean=stored.mean.to(mean.dtype), var=stored.var.to(var.dtype))
    new = ema(wide, Moments(mean, var, 1), momentum)
    write_(stored, Moments(torch.where(n > 0, new.mean, wide.mean), torch.where(n > 0, new.var, wide.var), 0))


def rms_eps(x: Tensor, eps: float | None) -> float:
    """Return the eps of a root mean square norm of x."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


def last(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the last dimensions of x, as many as `shape` has."""
    return tuple(range(x.dim() - len(shape), x.dim()))
