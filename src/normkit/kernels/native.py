"""The C++ loops, for CPUs: each tensor is read and written as few times as can be."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels import reference
from normkit.kernels.context import is_exporting, is_watched
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

try:
    import normkit._core as _core
except ImportError as error:  # installed without a compiler
    _core = None  # type: ignore[assignment]
    WHY_NOT: str | None = f"normkit was built without its C++ core ({error})"
else:
    WHY_NOT = None

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_F32, _CPU = torch.float32, torch.device("cpu")  # of memory that the core writes, whatever the defaults are
_LEAST_WEIGHT = 1e-3  # below, too little of the input is left in the output to be worked out again


def _take_torchs_threads() -> bool:
    """Give the core the address of torch's own parallel loop: its threads, and its set_num_threads, are then ours."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        address = ctypes.cast(ctypes.CDLL(str(library)).torch_parallel_for, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return False  # another build of torch: one thread
    _core.use_threads(address)
    return True


HAS_THREADS = _core is not None and _take_torchs_threads()


def instruction_set() -> str:
    """Return the instruction set of the loops in use: avx512, avx2 or baseline."""
    return str(_core.instruction_set())


# ---- what the loops can take


class Layout(NamedTuple):
    """How memory is seen: see Job in csrc/job.h."""

    channels_last: int
    populations: int  # of examples that share statistics
    examples: int  # of one population
    groups: int  # of channels that share statistics
    channels: int  # of one group
    positions: int
    reordered: bool = False  # weight and bias must follow the input's channels to the end


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
    first = over[0]  # of a vector, 0: one example, and all of it
    if over != tuple(range(first, rank)):
        return None
    size = prod(shape[first:])
    if len(parameter) < rank:  # the shape of what is normalised, or nothing at all
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
    form = _CHANNELS_LAST.get(x.dim())
    return form is not None and x.is_contiguous(memory_format=form)


def plan(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Plan | str:
    """Return how the loops would go over x, or why they cannot."""
    if WHY_NOT is not None:
        return WHY_NOT
    if not x.is_cpu:
        return f"the loops run on CPUs; this is {x.device.type}"
    if mask is not None:
        return "the loops count every value"
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return f"the loops read plain tensors; this is a {type(x).__name__}"
    stride = x.stride()
    if residual is not None and (residual.dtype is not x.dtype or residual.stride() != stride):
        return "the residual has another type or layout than the input"
    if torch.compiler.is_compiling() or is_exporting() or is_watched():
        return "somebody watches the operators: a compiler, a transform or a dispatch mode"
    own: Sequence[int] = ()
    for t in (weight, bias):
        if t is not None:
            own = recipe.parameters or t.shape
            if t.dtype is torch.float64 or not t.is_cpu:
                return f"the loops take weight and bias on this CPU and no wider than float32; got {t.dtype}"
    return _plan(x.dtype, x.shape, stride, recipe, own)


def takes(
    x: Tensor, activation: str | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Whether the loops have what a call needs, by the types of its tensors alone: all that a compiler knows."""
    return (
        WHY_NOT is None
        and x.device.type == "cpu"
        and x.dtype in _TYPES
        and activation in _ACTIVATIONS
        and (residual is None or residual.dtype is x.dtype)
        and all(t is None or t.dtype is not torch.float64 for t in (weight, bias))
    )


@lru_cache(maxsize=1024)
def _plan(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], recipe: Recipe, own: Sequence[int]
) -> Plan | str:
    """The part of a plan that depends on sizes alone, and comes back in every step of a training."""
    if 0 in shape:
        return "the loops need a value to begin with"
    if dtype not in _TYPES:
        return f"the loops have no {dtype}"
    if recipe.activation not in _ACTIVATIONS:
        return f"the loops have no {recipe.activation}"
    layout = layout_of(torch.empty_strided(shape, stride, device="meta"), recipe, own)
    if layout is None:
        return "the loops take contiguous or channels_last memory"
    kind, activation = _TYPES[dtype], _ACTIVATIONS[recipe.activation]
    header = struct.pack("=9qd", kind, activation, layout[0], recipe.centred, *layout[1:6], recipe.eps)
    return Plan(
        recipe,
        layout,
        header,
        layout.populations * layout.groups,
        layout.examples * layout.channels * layout.positions,
        tuple(n for d, n in enumerate(shape) if d not in recipe.over),
    )


class Plan(NamedTuple):
    """A call, but for its tensors."""

    recipe: Recipe
    layout: Layout
    header: bytes  # all that is not a tensor, as the core reads it
    statistics: int  # means, and as many variances
    values: int  # behind each of them
    shape: tuple[int, ...]  # of the statistics

    def arguments(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, both: Tensor) -> Any:
        """What every function of the core begins with; weight and bias are plain, variances come after the means."""
        w = 0 if weight is None else weight.data_ptr()
        b = 0 if bias is None else bias.data_ptr()
        return self.header, x.data_ptr(), w, b, both.data_ptr()

    def plain(self, t: Tensor | None) -> Tensor | None:
        """A parameter as the core reads it: float32, in the order of the input's memory."""
        if t is None:
            return None
        if self.layout.reordered:
            t = t.detach().movedim(0, -1)
        return t if t.dtype is torch.float32 and t.is_contiguous() else t.detach().float().contiguous()

    def as_parameter(self, gradient: Tensor, t: Tensor) -> Tensor:
        """A gradient, as the core wrote it, in its parameter's type and shape."""
        if self.layout.reordered:
            gradient = gradient.movedim(-1, 0).contiguous()
        return gradient.to(t.dtype)

    def moments(self, both: Tensor) -> Moments:
        """Means and variances in the shape that the input has without the dimensions they are over."""
        mean, var = both.view(2, *self.shape)
        return Moments(mean, var, self.values)


# ---- calls of the core


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def like(dy: Tensor, x: Tensor) -> Tensor:
    """The output's gradient in the type and the layout of the input."""
    if dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    return dy if dy.stride() == x.stride() else torch.empty_like(x).copy_(dy)


def backward(
    plan: Plan,
    wants: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    y: Any,
    both: Tensor,
    stored: bool,
    inverted: bool,
) -> Any:
    """Gradients of x, weight, bias and residual; `y` is there if the sign of an activation must be read from it."""
    if dy.dtype is not x.dtype or dy.stride() != x.stride():
        dy = like(dy, x)
    dx = torch.empty_like(x)
    reordered = plan.layout.reordered
    dweight = dbias = dresidual = None
    if wants[1]:
        dweight = torch.empty(weight.movedim(0, -1).shape if reordered else weight.shape, dtype=_F32, device=_CPU)
    if wants[2]:
        dbias = torch.empty(bias.movedim(0, -1).shape if reordered else bias.shape, dtype=_F32, device=_CPU)
    if y is not None and wants[3]:
        dresidual = torch.empty_like(x)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    _core.backward(
        *plan.arguments(x, plain_weight, plain_bias, both),
        0 if y is None else y.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        0 if dresidual is None else dresidual.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        stored,
        inverted,
    )
    if y is None and wants[3]:
        dresidual = dy  # nothing stands between the residual and the output
    if dweight is not None and (reordered or weight.dtype is not torch.float32):
        dweight = plan.as_parameter(dweight, weight)
    if dbias is not None and (reordered or bias.dtype is not torch.float32):
        dbias = plan.as_parameter(dbias, bias)
    return dx, dweight, dbias, dresidual


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    plan: Plan,
    update: tuple[float, ...],
) -> Tensor:
    """Write the output to `y`; return means and variances."""
    both = torch.empty(2 * plan.statistics, dtype=torch.float64, device=_CPU)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    _core.forward(*arguments, _pointer(residual), y.data_ptr(), *update)
    return both


class Normalize(torch.autograd.Function):
    """As `reference.Normalize`; of the input only itself is kept, and of an output with a residual the sign it has."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        plan: Plan,
        update: tuple[float, ...],
        kept: list[Tensor],
    ) -> Tensor:
        """Return the output, and leave means and variances in `kept`."""
        ctx.plan = plan
        y = torch.empty_like(x)
        both = forward(x, weight, bias, residual, y, plan, update)
        kept.append(both)
        if residual is None or plan.recipe.activation is None:
            ctx.save_for_backward(x, weight, bias, both)
        else:
            ctx.save_for_backward(x, weight, bias, both, residual, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, both, *signed = ctx.saved_tensors
        residual, y = signed or (None, None)
        if not torch.is_grad_enabled():
            found = backward(ctx.plan, ctx.needs_input_grad, grads[0], x, weight, bias, y, both, False, False)
            return (*found, None, None, None)
        # To be differentiated again, it must be made of operators.
        recipe = ctx.plan.recipe
        dx, dweight, dbias, dresidual, _ = reference.gradients(
            grads[0], x, recipe.view(weight), recipe.view(bias), residual, None, recipe, ctx.needs_input_grad[3]
        )
        dweight = None if dweight is None else dweight.reshape(weight.shape)
        dbias = None if dbias is None else dbias.reshape(bias.shape)
        return dx, dweight, dbias, dresidual, None, None, None


class NormalizeStored(torch.autograd.Function):
    """Normalise with statistics that are given, and to which no gradient flows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        plan: Plan,
    ) -> Tensor:
        """Return the output."""
        ctx.plan = plan
        both = torch.stack([mean, var]).double()
        y = evaluate(x, weight, bias, residual, mean, var, plan)
        if residual is None or plan.recipe.activation is None:
            ctx.save_for_backward(x, weight, bias, both)
        else:
            ctx.save_for_backward(x, weight, bias, both, residual, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, both, *signed = ctx.saved_tensors
        residual, y = signed or (None, None)
        if not torch.is_grad_enabled():
            found = backward(ctx.plan, ctx.needs_input_grad, grads[0], x, weight, bias, y, both, True, False)
            return (*found, None, None, None)
        # To be differentiated again, it must be made of operators.
        if residual is None and ctx.needs_input_grad[3]:
            residual = torch.zeros_like(x).requires_grad_()  # whatever its value was, its gradient is the output's
        tensors = (x, weight, bias, residual)
        inputs = [t if wanted else None for t, wanted in zip(tensors, ctx.needs_input_grad, strict=False)]
        with torch.enable_grad():
            stored = Moments(both[0], both[1], 0)
            again = reference.normalize_stored(x, ctx.plan.recipe, stored, weight, bias, residual)
            found = iter(torch.autograd.grad(again, [t for t in inputs if t is not None], grads[0], create_graph=True))
        return (*(None if t is None else next(found) for t in inputs), None, None, None)


class NormalizeInPlace(torch.autograd.Function):
    """As `Normalize`, into the input's own memory: the output is all that is kept, and the backward works out the rest.

    Rota Bulo, Porzi & Kontschieder 2018, with the normalised input recovered from the output by undoing the activation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
        update: tuple[float, ...],
        kept: list[Tensor],
    ) -> Tensor:
        """Return the input, overwritten, and leave means and variances in `kept`."""
        ctx.plan = plan
        both = forward(x, weight, bias, None, x, plan, update)
        kept.append(both)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, both)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias."""
        y, weight, bias, both = ctx.saved_tensors
        found = backward(ctx.plan, ctx.needs_input_grad, grads[0], y, weight, bias, None, both, False, True)
        return (*found[:3], None, None, None)


# ---- what the loops do

NO_UPDATE = (0, 0, 0, 0, 0.0)


# What Function.apply is without its questions about torch.func, which a plan has already answered.
_apply = super(torch.autograd.Function, Normalize).apply


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
    inplace: bool = False,
    update: tuple[float, ...] = NO_UPDATE,
) -> tuple[Tensor, Tensor]:
    """Return what `reference.normalize` does, and means and variances for `plan.moments`.

    In place, the result is in the memory of x, if that can be worked out again from the result.
    """
    kept: list[Tensor] = []
    if inplace and residual is None and _is_invertible(plan.recipe, weight):
        y = NormalizeInPlace.apply(x, weight, bias, plan, update, kept)
    else:
        y = _apply(x, weight, bias, residual, plan, update, kept)
    return y, kept[0]


def _is_invertible(recipe: Recipe, weight: Tensor | None) -> bool:
    """Whether the input can be worked out from the output: nothing may be lost on the way."""
    if recipe.activation == "relu":
        return False
    return weight is None or weight.numel() == 0 or bool(weight.detach().abs().min() >= _LEAST_WEIGHT)


def moments(x: Tensor, plan: Plan) -> Moments:
    """As `reference.moments`, without a gradient and without the reduced dimensions."""
    both = torch.empty(2 * plan.statistics, dtype=torch.float64, device=_CPU)
    _core.moments(*plan.arguments(x, None, None, both))
    return plan.moments(both)


def normalize_stored(
    x: Tensor,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    plan: Plan,
) -> Tensor:
    """As `reference.normalize_stored`, for statistics without a gradient."""
    mean, var = stored.mean, stored.var
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, residual)):
        return cast(Tensor, NormalizeStored.apply(x, weight, bias, residual, mean, var, plan))
    return evaluate(x, weight, bias, residual, mean, var, plan)


def evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    var: Tensor,
    plan: Plan,
) -> Tensor:
    """As `normalize_stored`, without autograd."""
    plain = mean.dtype is var.dtype is torch.float32 and mean.is_contiguous() and var.is_contiguous()
    if not plain:
        mean, var = mean.double().contiguous(), var.double().contiguous()
    y = torch.empty_like(x)
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    arguments = plan.arguments(x, plain_weight, plain_bias, mean)
    _core.evaluate(*arguments, _pointer(residual), y.data_ptr(), var.data_ptr(), not plain)
    return y


def backward_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None, m: Moments, plan: Plan
) -> Tensor:
    """The first half of a backward: sums of the gradient behind the activation, and of its product with xhat."""
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    sums = torch.empty(2, *plan.shape, dtype=torch.float64, device=_CPU)
    arguments = plan.arguments(x, plain_weight, plain_bias, both)
    _core.backward_sums(*arguments, _pointer(y), dy.data_ptr(), sums[0].data_ptr(), sums[1].data_ptr())
    return sums


def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    m: Moments,
    plan: Plan,
    sums: Tensor,
    wants_dresidual: bool,
) -> tuple[Tensor, Tensor | None]:
    """The second half: the gradients of x and of the residual, from sums over everything that shares the statistics."""
    dy, both = like(dy, x), torch.stack([m.mean, m.var]).double()
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if wants_dresidual and y is not None else None
    plain_weight, plain_bias = plan.plain(weight), plan.plain(bias)
    sums = sums.double().contiguous()
    _core.backward_apply(
        *plan.arguments(x, plain_weight, plain_bias, both),
        _pointer(y),
        dy.data_ptr(),
        dx.data_ptr(),
        _pointer(dresidual),
        sums[0].data_ptr(),
        sums[1].data_ptr(),
        float(m.count),
    )
    return dx, dy if wants_dresidual and y is None else dresidual


def copy_past_cache(source: Tensor, target: Tensor) -> None:
    """Copy between two tensors of one layout with stores that leave the cache alone: what memory by itself can do."""
    _core.copy(source.data_ptr(), target.data_ptr(), source.numel() * source.itemsize)


def update_of(stored: Moments, momentum: float | Tensor | None) -> tuple[float, ...] | None:
    """Return what moves these statistics along with a forward, or None if the core cannot: it writes plain memory."""
    mean, var, count = stored
    wide = mean.dtype is torch.float64
    if (
        not isinstance(momentum, float | int)
        or not (type(mean) is type(var) is Tensor)
        or mean.dtype is not var.dtype
        or not (wide or mean.dtype is torch.float32)
        or not (mean.is_cpu and mean.is_contiguous() and var.is_contiguous())
    ):
        return None
    if type(count) is Tensor:
        return (mean.data_ptr(), var.data_ptr(), count.data_ptr(), wide, momentum)
    return (mean.data_ptr(), var.data_ptr(), 0, wide, momentum) if isinstance(count, int) else None


def count_update(stored: Moments) -> None:
    """Let autograd know that these statistics were written, as an operator would."""
    mean, var, count = stored
    if not mean.is_inference():
        torch._C._increment_version((mean, var, count) if isinstance(count, Tensor) else (mean, var))
