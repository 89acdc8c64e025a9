"""Checks of what users pass; errors say what was needed, what came and what to do. Kernels do not check again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from normkit.activations import LEAKY_SLOPE, ActivationLike, check_any, label
from normkit.errors import ArgumentError, DtypeError, NonFiniteError, NormkitError, ShapeError
from normkit.moments import Moments
from normkit.tracing import is_exporting

NonFinite = Literal["propagate", "raise", "skip-update"]

_AXES = {2: "N, {c}", 3: "N, {c}, L", 4: "N, {c}, H, W", 5: "N, {c}, D, H, W"}


def options(
    eps: float, momentum: float | Tensor | None, activation: ActivationLike | None, nonfinite: str = "propagate"
) -> None:
    """Check what every batch norm takes, whether called as a function or built as a layer."""
    if not eps > 0:
        raise ArgumentError(f"eps must be positive, it keeps the division finite; got {eps}. The usual value is 1e-5.")
    if isinstance(momentum, (float, int)) and not 0 <= momentum <= 1:  # torch 2.9 compiles no union here
        raise ArgumentError(
            f"momentum must lie in 0..1, or be None for a cumulative average; got {momentum}. "
            "It weights the new value: Keras' 0.99 is 0.01 here."
        )
    check_any(activation)
    if nonfinite not in get_args(NonFinite):
        known = ", ".join(f'"{n}"' for n in get_args(NonFinite))
        raise ArgumentError(f"nonfinite must be one of {known}; got {nonfinite!r}.")


def invertible(inplace: bool, activation: ActivationLike | None, negative_slope: float = LEAKY_SLOPE) -> None:
    """Check that what is to be overwritten can be worked out again from what replaces it."""
    if inplace and (activation not in (None, "leaky_relu") or negative_slope != LEAKY_SLOPE):
        slope = f" with a slope of {negative_slope}" if negative_slope != LEAKY_SLOPE else ""
        raise ArgumentError(
            f'inplace=True needs an activation that can be undone, "leaky_relu" or None; '
            f'got "{label(activation)}"{slope}.'
        )


def tracked(track_running_stats: bool, who: object) -> None:
    """Check that a layer which lives by its running statistics has them."""
    if not track_running_stats:
        raise ArgumentError(f"{who} needs its running statistics; got track_running_stats=False.")


def batch_input(x: Tensor, who: object, features: Sequence[int], ranks: Sequence[int]) -> None:
    """Check rank, channels (and positions, where statistics are per position) and type of a batch norm's input."""
    if is_exporting():
        return  # the sizes of a recorded graph are not this input's; torch.jit.trace warns when they are read
    floating(x, who)
    if x.dim() in ranks and x.shape[1 : 1 + len(features)] == tuple(features):
        return
    if len(features) > 1:
        needed = f"(N, {', '.join(map(str, features))})"
    else:
        channels = features[0] if features else "C"
        needed = " or ".join(f"({_AXES.get(r, 'N, {c}, ...').format(c=channels)})" for r in ranks)
    hint = "Check the number of channels."
    if x.dim() not in ranks:
        hint = "A single example? Add the batch dimension with x.unsqueeze(0)."
    elif x.shape[-1] == features[0]:
        hint = "Channels in the last dimension? Move them with x.movedim(-1, 1), or give a BatchNorm dim=-1."
    raise ShapeError(f"{who} needs {needed}; got {tuple(x.shape)}. {hint}")


def channel_dim(dim: int, rank: int, who: object) -> None:
    """Check which dimension of inputs of at most this rank has the channels."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim == 0 or not -rank < dim < rank:
        raise ArgumentError(
            f"{who}: dim must be that of the channels, from 1 to {rank - 1} or from -{rank - 1} to -1, because the "
            f"first has the examples; got {dim!r}."
        )


def channels_at(dim: int, x: Tensor, who: object, channels: int, ranks: Sequence[int]) -> int:
    """Check an input that has its channels in dimension `dim`; return that, counted from the first."""
    rank = x.dim()
    own = dim + rank if dim < 0 else dim
    if is_exporting():
        return own
    floating(x, who)
    if rank in ranks and 0 < own < rank and x.shape[own] == channels:
        return own
    places = [dim + r if dim < 0 else dim for r in ranks]
    needed = [_with_channels_at(place, r, channels) for place, r in zip(places, ranks, strict=True) if 0 < place < r]
    hint = "Check the number of channels."
    if rank not in ranks:
        hint = "A single example? Add the batch dimension with x.unsqueeze(0)."
    elif x.shape[1] == channels:
        hint = "Channels in dimension 1? Leave dim= out."
    raise ShapeError(f"{who} needs {' or '.join(needed)}; got {tuple(x.shape)}. {hint}")


def _with_channels_at(dim: int, rank: int, channels: int) -> str:
    axes = _AXES[rank].format(c=channels).split(", ")
    axes.insert(dim, axes.pop(1))
    return f"({', '.join(axes)})"


def floating(x: Tensor, who: object) -> None:
    """Check that the input is of a floating point type."""
    if not x.is_floating_point():
        raise DtypeError(f"{who} needs a floating point input; got {x.dtype}. Convert it first: x.float().")


def last_dimensions(x: Tensor, who: object, shape: Sequence[int]) -> None:
    """Check the input of a norm over the last dimensions."""
    if is_exporting():
        return
    floating(x, who)
    if tuple(x.shape[max(0, x.dim() - len(shape)) :]) == tuple(shape):
        return
    hint = "Check the normalized shape."
    if x.dim() > 2 and x.shape[1] == shape[-1]:
        hint = "Channels in dimension 1? Use LayerNorm2d or RMSNorm2d, or move them with x.movedim(1, -1)."
    raise ShapeError(f"{who} needs (..., {', '.join(map(str, shape))}); got {tuple(x.shape)}. {hint}")


def instance_input(x: Tensor, who: object, channels: int, rank: int) -> None:
    """Check an instance norm's input: a batch of `rank` dimensions, or one example without the first."""
    if is_exporting():
        return
    floating(x, who)
    if x.dim() in (rank - 1, rank) and x.shape[1 - rank] == channels:
        return
    batch = _AXES[rank].format(c=channels)
    hint = "Check the number of channels."
    if x.dim() not in (rank - 1, rank):
        hint = "Check the number of dimensions."
    elif x.shape[-1] == channels:
        hint = "Channels in the last dimension? Move them to the front of the positions with x.movedim."
    raise ShapeError(f"{who} needs ({batch}) or ({batch.removeprefix('N, ')}); got {tuple(x.shape)}. {hint}")


def normalized_shape(shape: int | Sequence[int], who: object) -> tuple[int, ...]:
    """Return the sizes of the last dimensions that share statistics, as a tuple."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or min(sizes) < 0:
        raise ArgumentError(
            f"{who} needs a normalized_shape of one or more sizes, those of the last dimensions; got {shape}."
        )
    return sizes


def channels(number: int, who: object) -> int:
    """Return the number of channels of a layer, which must be one."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ArgumentError(f"{who} needs a number of channels, 1 or more; got {number!r}.")
    return number


def groups(divisor: int, num_channels: int, who: object, name: str = "num_groups") -> None:
    """Check that groups of channels come out even, whether their number is given or their size."""
    if divisor < 1 or num_channels % divisor:
        fitting = [g for g in range(1, num_channels + 1) if num_channels % g == 0]
        raise ArgumentError(
            f"{who}: {name} must divide the {num_channels} channels; got {divisor}. "
            f"Use one of {', '.join(map(str, fitting))}."
        )


def one_per_channel(t: Tensor | None, name: str, who: object, features: Sequence[int], each: str = "channel") -> None:
    """Check the shape of a weight, bias or running statistic."""
    if t is not None and t.shape != tuple(features):
        raise ShapeError(
            f"{who} needs a {name} of shape {tuple(features)}, one value per {each}; got {tuple(t.shape)}."
        )


def same_shape(added: Tensor | None, x: Tensor, who: object, name: str = "a residual") -> None:
    """Check that what is added fits what it is added to."""
    if added is not None and added.shape != x.shape:
        raise ShapeError(
            f"{who} needs {name} of the input's shape {tuple(x.shape)}; got {tuple(added.shape)}. "
            "Project or pool the shortcut first."
        )


def position_mask(mask: Tensor | None, x: Tensor, who: object) -> Tensor | None:
    """Return the mask as booleans that broadcast against x: (N, 1, ...)."""
    if mask is None:
        return None
    if mask.is_floating_point() or mask.is_complex():
        raise DtypeError(
            f"{who} needs a boolean mask, true where a position counts; got {mask.dtype}. "
            "Make it one: lengths[:, None] > positions, or mask > 0.5."
        )
    positions = (x.shape[0], *x.shape[2:])
    if mask.shape == positions:
        mask = mask.unsqueeze(1)
    if mask.shape != (x.shape[0], 1, *x.shape[2:]):
        raise ShapeError(
            f"{who} needs a mask of shape {positions}, one value per example and position (true: it counts); "
            f"got {tuple(mask.shape)}."
        )
    return mask.bool()


def enough_values(count: int | Tensor, x: Tensor, who: object) -> None:
    """Check that a training batch has a variance at all."""

    def error() -> ShapeError:
        many = f"input {tuple(x.shape)}"
        if isinstance(count, Tensor):
            many += ", of which, after the mask and over all ranks, one value or none counts"
        return ShapeError(
            f"{who} needs more than 1 value per channel in training; got {many}. "
            "Use a larger batch (a DataLoader's drop_last=True drops a last one of 1), or call .eval()."
        )

    if isinstance(count, Tensor):
        require((count > 1).all(), error)
    elif count <= 1:
        raise error()


def more_than_one(count: int, x: Tensor, who: object, where: str, remedy: str) -> None:
    """Check that what shares statistics is more than one value, which less its own mean is always zero."""
    if count <= 1 and not is_exporting():
        raise ShapeError(
            f"{who} needs more than 1 value per {where}: a single one always becomes zero; "
            f"got input {tuple(x.shape)}. {remedy}"
        )


def finite(batch: Moments, who: object) -> None:
    """Raise where a batch's statistics are not finite, naming the channels."""
    good = batch.mean.isfinite() & batch.var.isfinite()

    def error() -> NonFiniteError:
        bad = (~good).flatten().nonzero().flatten().tolist() if not torch.compiler.is_compiling() else []
        where = f" in channels {bad[:8]}{'...' if len(bad) > 8 else ''}" if bad else ""
        return NonFiniteError(
            f"{who} needs finite input; this batch's statistics are NaN or infinite{where}. "
            "Running statistics were left as they were. Look for the first layer or example that overflows, "
            'or keep training past such batches with nonfinite="skip-update".'
        )

    require(good.all(), error)


def require(condition: Tensor, error: Callable[[], NormkitError]) -> None:
    """Raise `error()` unless the condition, known only from the data, holds; in a compiled graph, at run time."""
    if torch._C._functorch.is_batchedtensor(condition):
        return  # vmap knows many truths at once, and cannot raise for one of them
    if torch.compiler.is_compiling():
        torch._assert_async(condition, error().args[0])  # str() of an error is beyond the compiler of torch 2.10
    elif not condition.is_meta and not condition:
        raise error()
