"""What the C++ loops can take, and how they see its memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import core
from normkit.kernels.reference import Recipe
from normkit.moments import Moments
from normkit.tracing import is_exporting, is_watched

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # as Type in csrc/job.h
_ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3, "gelu": 4, "sigmoid": 5, "tanh": 6}
Copy = Literal["dense", "contiguous"]  # in the order of the input's dimensions in memory, or in that of its shape
_SMOOTH = ("silu", "gelu", "sigmoid", "tanh")  # in float lanes alone
_LINE = 4096  # values of the last dimensions: up to here the loops for lines are the faster, also without parameters
FEW_LINES = 4  # of an example: with fewer, parameters of its own are about as many as its values


Memory = Tensor | bytearray  # of means and variances, in double


class Layout(NamedTuple):
    """How memory is seen: see Job in csrc/job.h."""

    channels_last: int
    populations: int  # of examples that share statistics
    examples: int  # of one population
    groups: int  # of channels that share statistics
    channels: int  # of one group
    positions: int
    reordered: bool = False  # weight and bias must follow the input's channels to the end
    sets: int = 1  # of weights and biases, for as many equal runs of populations


def layout_of(x: Tensor, recipe: Recipe, parameter: Sequence[int]) -> Layout | None:
    """Return how the loops are to see x, with parameters that broadcast from this shape, or None if they cannot."""
    over, shape, rank = recipe.over, x.shape, x.dim()
    contiguous = x.is_contiguous()
    if over[0] == 0:
        if rank > 1 and over == (0, *range(2, rank)):
            channels = shape[1]
            positions = x.numel() // max(1, shape[0] * channels)
            if contiguous:
                return Layout(0, 1, shape[0], channels, 1, positions)
            return Layout(1, 1, shape[0], channels, 1, positions) if _is_channels_last(x) else None
        if rank > 1:
            return Layout(0, 1, shape[0], prod(shape[1:]), 1, 1) if over == (0,) and contiguous else None
    if rank > 2 and over == (1, *range(3, rank)):  # a batch in chunks, with statistics of their own
        sizes = (shape[0], shape[1], shape[2], 1, prod(shape[3:]))
        if contiguous:
            return Layout(0, *sizes)
        return Layout(1, *sizes) if rank > 3 and x.movedim(2, -1).is_contiguous() else None
    first = over[0]  # of a vector, 0: one example, and all of it
    if over != tuple(range(first, rank)):
        return None
    size = prod(shape[first:])
    if first > 0 and tuple(parameter) == (shape[0], *(1,) * (first - 1), *shape[first:]):  # of each example its own
        return Layout(0, prod(shape[:first]), 1, 1, size, 1, sets=shape[0]) if contiguous else None
    if len(parameter) < rank:  # the shape of what is normalized, or nothing at all
        if parameter and tuple(parameter) != tuple(shape[first:]):
            return None
        split = (1, size, 1) if parameter else (1, 1, size)
        if contiguous:
            return Layout(0, prod(shape[:first]), 1, *split)
        return Layout(0, shape[0], 1, *split, bool(parameter)) if first == 1 and _is_channels_last(x) else None
    own = max((d for d in range(rank) if parameter[d] > 1), default=first - 1)  # the last dimension with parameters
    if parameter[0] != 1 or tuple(parameter[1 : own + 1]) != tuple(shape[1 : own + 1]) or own < first - 1:
        return None
    groups, channels, positions = prod(shape[1:first]), prod(shape[first : own + 1]), prod(shape[own + 1 :])
    if contiguous:
        return Layout(0, shape[0], 1, groups, channels, positions)
    if x.permute(0, *range(own + 1, rank), *range(1, own + 1)).is_contiguous():
        return Layout(1, shape[0], 1, groups, channels, positions)
    return None


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def plan(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Plan | str:
    """Return how the loops would go over x, or why they cannot."""
    if core.WHY_NOT is not None:
        return core.WHY_NOT
    if not x.is_cpu:
        return f"the loops run on CPUs; this is {x.device.type}"
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return f"the loops read plain tensors; this is a {type(x).__name__}"
    if residual is not None and residual.dtype is not x.dtype:
        return f"the residual has another type than the input: {residual.dtype}, not {x.dtype}"
    if torch.compiler.is_compiling() or is_exporting() or is_watched():
        return "a compiler, a transform or a dispatch mode watches the operators"
    own: Sequence[int] = ()
    for t in (weight, bias):
        if t is not None:
            own = recipe.parameters or t.shape
            if not t.is_cpu:
                return f"weight and bias are on another device than the input: {t.device.type}"
    found = _plan(x.dtype, x.shape, x.stride(), recipe, own)
    if mask is not None and isinstance(found, Plan):
        layout = found.layout
        if mask.numel() != layout.populations * layout.examples * layout.positions:
            return "the loops take one mask for all channels"
    return found


def takes(
    x: Tensor, activation: str | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Whether the loops have what a call needs, by the types of its tensors alone: all that a compiler knows."""
    return (
        core.WHY_NOT is None
        and x.device.type == "cpu"
        and _has(x.dtype, activation)
        and (residual is None or residual.dtype is x.dtype)
    )


def _has(dtype: torch.dtype, activation: str | None) -> bool:
    return dtype in TYPES and activation in _ACTIVATIONS and not (dtype is torch.float64 and activation in _SMOOTH)


@lru_cache(maxsize=1024)
def _plan(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], recipe: Recipe, own: Sequence[int]
) -> Plan | str:
    """The part of a plan that depends on types and sizes alone, which repeat in every step of training."""
    if 0 in shape:
        return "the loops need at least one value"
    if not _has(dtype, recipe.activation):
        return f"the loops have no {dtype} with the activation {recipe.activation}"
    x = torch.empty_strided(shape, stride, device="meta")
    layout = layout_of(x, recipe, own)
    copy: Copy | None = None
    if layout is None:
        layout, copy = layout_of(torch.empty_like(x), recipe, own), "dense"
    if layout is None:
        layout, copy = layout_of(torch.empty(shape, device="meta"), recipe, own), "contiguous"
    if layout is None:
        return "the loops have no way over these dimensions"
    return Plan(
        recipe,
        layout,
        _header(dtype, recipe, layout),
        layout.populations * layout.groups,
        layout.examples * layout.channels * layout.positions,
        tuple(n for d, n in enumerate(shape) if d not in recipe.over),
        dtype,
        torch.float64 if dtype is torch.float64 else torch.float32,
        copy,
    )


def _header(dtype: torch.dtype, recipe: Recipe, layout: Layout) -> bytes:
    kind, activation = TYPES[dtype], _ACTIVATIONS[recipe.activation]
    return struct.pack("=10qd", kind, activation, layout[0], recipe.centred, *layout[1:6], layout.sets, recipe.eps)


# ---- plans of layers, for tensors of these shapes; None if the shapes do not fit, or the loops cannot run

Shape = tuple[int, ...]


@lru_cache(maxsize=1024)
def of_batch(
    dtype: torch.dtype,
    shape: Shape,
    stride: Shape,
    weight: Shape | None,
    bias: Shape | None,
    features: Shape,
    ranks: Sequence[int],
    eps: float,
    activation: str | None,
) -> Plan | None:
    """The plan of a batch norm over channels of the shape `features`."""
    rank = len(shape)
    if rank not in ranks or shape[1:2] != features or not {weight, bias} <= {features, None}:
        return None
    recipe = Recipe((0, *range(2, rank)), eps, activation, True, (1, *features, *(1,) * (rank - 2)))
    return _of_layer(dtype, shape, stride, recipe, recipe.parameters or ())


@lru_cache(maxsize=1024)
def of_groups(
    dtype: torch.dtype,
    shape: Shape,
    stride: Shape,
    weight: Shape | None,
    bias: Shape | None,
    groups: int,
    channels: int,
    eps: float,
    activation: str | None,
) -> Plan | None:
    """The plan of a group norm, for an input whose channels are not divided into groups."""
    if len(shape) < 2 or shape[1] != channels or not {weight, bias} <= {(channels,), None}:
        return None
    split, rank = (groups, channels // groups), len(shape)
    recipe = Recipe(tuple(range(2, rank + 1)), eps, activation, True, (1, *split, *(1,) * (rank - 2)))
    divided = (stride[0], stride[1] * split[1], stride[1], *stride[2:])
    own = (recipe.parameters or ()) if weight or bias else ()
    plan = _of_layer(dtype, (shape[0], *split, *shape[2:]), divided, recipe, own)
    return None if plan is None else plan._replace(split=split)


@lru_cache(maxsize=1024)
def of_last(
    dtype: torch.dtype,
    shape: Shape,
    stride: Shape,
    weight: Shape | None,
    bias: Shape | None,
    normalized: Shape,
    eps: float,
    activation: str | None,
    centred: bool = True,
) -> Plan | None:
    """The plan of a norm over the last dimensions, with parameters of all examples or of each."""
    first = len(shape) - len(normalized)
    if first < 0 or shape[first:] != normalized:
        return None
    recipe = Recipe(tuple(range(first, len(shape))), eps, activation, centred)
    given = {weight, bias} - {None}
    if first > 1 and given == {(shape[0], *normalized)} and prod(shape[1:first]) >= FEW_LINES:
        own = (shape[0], *(1,) * (first - 1), *normalized)
        return _of_layer(dtype, shape, stride, recipe._replace(parameters=own), own)
    if not given <= {normalized}:
        return None
    are_lines = given or (first > 0 and prod(normalized) <= _LINE)
    return _of_layer(dtype, shape, stride, recipe, normalized if are_lines else ())


def of_last_squares(*arguments: Any) -> Plan | None:
    """As `of_last`, about zero."""
    return of_last(*arguments, False)


def _of_layer(dtype: torch.dtype, shape: Shape, stride: Shape, recipe: Recipe, own: Shape) -> Plan | None:
    found = _plan(dtype, shape, stride, recipe, own)
    return found if isinstance(found, Plan) and (found.values > 1 or not recipe.centred) else None


class Plan(NamedTuple):
    """A call, apart from its tensors."""

    recipe: Recipe
    layout: Layout
    header: bytes  # all that is not a tensor, as the core reads it
    statistics: int  # means, and as many variances
    values: int  # that each of them is made of
    shape: tuple[int, ...]  # of the statistics
    dtype: torch.dtype  # of the input
    plain_dtype: torch.dtype  # of parameters, as the core reads them
    copy: Copy | None = None  # to be made of an input with strides that the loops cannot follow
    split: tuple[int, int] | None = None  # groups and channels of each, where x is not divided as the recipe says

    def arguments(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, both: Memory) -> Any:
        """What every function of the core begins with; weight and bias are plain, variances come after the means."""
        w = 0 if weight is None else weight.data_ptr()
        b = 0 if bias is None else bias.data_ptr()
        return self.header, x.data_ptr(), w, b, both if isinstance(both, bytearray) else both.data_ptr()

    def dense(self, x: Tensor) -> Tensor:
        """The input, in memory that the loops can go over."""
        if self.copy is None:
            return x
        return x.clone() if self.copy == "dense" else x.contiguous()

    def divided(self, t: Tensor) -> Tensor:
        """The input, or anything of its shape, as the recipe sees it."""
        return t if self.split is None else t.unflatten(1, self.split)

    def undivided(self, t: Tensor) -> Tensor:
        """The inverse of `divided`."""
        return t if self.split is None else t.flatten(1, 2)

    def plain(self, t: Tensor | None) -> Tensor | None:
        """A parameter as the core reads it: float32, or float64 beside it, in the order of the input's memory."""
        if t is None or (t.dtype is self.plain_dtype and t.is_contiguous() and not self.layout.reordered):
            return t
        t = t.detach()
        return (t.movedim(0, -1) if self.layout.reordered else t).to(self.plain_dtype).contiguous()

    def as_parameter(self, gradient: Tensor, t: Tensor) -> Tensor:
        """A gradient, as the core wrote it, in its parameter's type and shape."""
        if self.layout.reordered:
            gradient = gradient.movedim(-1, 0).contiguous()
        return gradient.to(t.dtype)

    def both(self, memory: bytearray) -> Tensor:
        """Means and variances in the shape that the input has without the dimensions they are over."""
        return torch.frombuffer(memory, dtype=torch.float64).view(2, *self.shape)

    def moments(self, both: bytearray, mask: Tensor | None = None) -> Moments:
        """The same as a value, with the number of values that a mask leaves of each."""
        mean, var = self.both(both)
        return Moments(mean, var, self.values if mask is None else self.counted(mask).expand(self.shape))

    def counted(self, mask: Tensor) -> Tensor:
        """How many values of each statistic a mask counts, as it broadcasts against the statistics."""
        of_populations = mask.reshape(self.layout.populations, -1).sum(1) * self.layout.channels
        return of_populations.reshape(-1, *[1] * (len(self.shape) - 1))
