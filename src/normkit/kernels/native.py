"""The C++ loops, for batch statistics on CPUs: each tensor is read and written as few times as can be."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _take_torchs_threads() -> None:
    """Give the core the address of torch's own parallel loop: its threads, and its set_num_threads, are then ours."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        address = ctypes.cast(ctypes.CDLL(str(library)).torch_parallel_for, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return  # another build of torch: one thread
    _core.use_threads(address)


if _core is not None:
    _take_torchs_threads()


def instruction_set() -> str:
    """Return the instruction set of the loops in use: avx512, avx2 or baseline."""
    return str(_core.instruction_set())


class Layout(NamedTuple):
    """How memory is seen: planes (n, c, s), or rows (n, c) with s = 1."""

    rows: int
    n: int
    c: int
    s: int


def layout_of(x: Tensor, over: tuple[int, ...]) -> Layout | None:
    """Return the layout of x, if its channels, or channels and positions, are what has statistics of its own."""
    examples = x.shape[0]
    if over == (0,) and x.is_contiguous():
        return Layout(1, examples, x.numel() // max(1, examples), 1)
    if over != (0, *range(2, x.dim())):
        return None
    channels = x.shape[1]
    positions = x.numel() // max(1, examples * channels)
    if x.is_contiguous():
        return Layout(0, examples, channels, positions)
    if x.dim() in (4, 5) and x.is_contiguous(memory_format=_FORMATS[x.dim() - 3]):
        return Layout(1, examples * positions, channels, 1)
    return None


def refuses(x: Tensor, recipe: Recipe, residual: Tensor | None, mask: Tensor | None) -> str | None:
    """Return why the loops cannot take this, or None if they can."""
    if WHY_NOT is not None:
        return WHY_NOT
    if x.device.type != "cpu":
        return f"the loops run on CPUs; this is {x.device.type}"
    if x.dtype not in _TYPES or x.dtype == torch.float64:
        return f"the loops have no {x.dtype}"
    if recipe.activation not in _ACTIVATIONS:
        return f"the loops have no {recipe.activation}"
    if not recipe.centred or mask is not None:
        return "the loops count every value, about its mean"
    if layout_of(x, recipe.over) is None:
        return "the loops take batch statistics of contiguous or channels_last memory"
    if residual is not None and (residual.dtype != x.dtype or residual.stride() != x.stride()):
        return "the residual has another type or layout than the input"
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"the loops read plain tensors; this is a {type(x).__name__}"
    if torch.compiler.is_compiling() or is_exporting() or is_watched():
        return "somebody watches the operators: a compiler, a transform or a dispatch mode"
    return None


def _statistics(x: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Memory for a mean and a variance that keep the dimensions `over`."""
    both = torch.empty([2, *(1 if d in over else n for d, n in enumerate(x.shape))], dtype=torch.float64)
    return both[0], both[1]


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _parameters(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return gamma and beta in one type that the core reads, and that type."""
    for t in (weight, bias):
        if t is not None and not (t.dtype == torch.float32 and t.is_contiguous()):
            break
    else:
        return weight, bias, _TYPES[torch.float32]
    weight, bias = (None if t is None else t.detach().double().contiguous() for t in (weight, bias))
    return weight, bias, _TYPES[torch.float64]


def _call(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments that every function of the core begins with, and what must live until it returns."""
    layout = layout_of(x, recipe.over)
    assert layout is not None
    weight, bias, kind = _parameters(weight, bias)
    pointers = (x.data_ptr(), _pointer(weight), _pointer(bias), kind, mean.data_ptr(), var.data_ptr())
    return (_TYPES[x.dtype], _ACTIVATIONS[recipe.activation], *layout, recipe.eps, *pointers), (weight, bias)


class Normalize(torch.autograd.Function):
    """As `reference.Normalize`; of the input only itself is kept, and of an output with a residual the sign it has."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, recipe: Recipe
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and variance, which keep the reduced dimensions."""
        mean, var = _statistics(x, recipe.over)
        y = torch.empty_like(x)
        arguments, alive = _call(x, recipe, weight, bias, mean, var)
        _core.forward(*arguments, _pointer(residual), y.data_ptr())
        del alive
        ctx.recipe = recipe
        ctx.mark_non_differentiable(mean, var)
        signed = y if residual is not None and recipe.activation is not None else None
        ctx.save_for_backward(x, weight, bias, residual if signed is not None else None, signed, mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        x, weight, bias, residual, y, mean, var = ctx.saved_tensors
        dy = grads[0]
        if torch.is_grad_enabled():  # to be differentiated again, it must be made of operators
            return reference.gradients(dy, x, weight, bias, residual, None, ctx.recipe, ctx.needs_input_grad[3])
        dy = dy.to(x.dtype)
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        dx = torch.empty_like(x)
        dweight, dbias = torch.empty_like(mean), torch.empty_like(mean)
        wants_dz = ctx.needs_input_grad[3] and y is not None
        dresidual = torch.empty_like(x) if wants_dz else None
        arguments, alive = _call(x, ctx.recipe, weight, bias, mean, var)
        _core.backward(
            *arguments,
            _pointer(y),
            dy.data_ptr(),
            dx.data_ptr(),
            _pointer(dresidual),
            dweight.data_ptr(),
            dbias.data_ptr(),
        )
        del alive
        if ctx.needs_input_grad[3] and y is None:
            dresidual = dy  # nothing stands between the residual and the output
        return (
            dx,
            None if weight is None else dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            dresidual,
            None,
        )


def normalize(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    """As `reference.normalize`, for what `refuses` does not refuse."""
    y, mean, var = Normalize.apply(x, weight, bias, residual, recipe)
    return y, Moments(mean, var, reference.count_values(x, recipe.over))


def moments(x: Tensor, over: tuple[int, ...]) -> Moments:
    """As `reference.moments`, without a gradient."""
    mean, var = _statistics(x, over)
    arguments, _ = _call(x, Recipe(over, 0.0), None, None, mean, var)
    _core.moments(*arguments)
    return Moments(mean, var, reference.count_values(x, over))


def normalize_stored(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Normalise with stored statistics, without a gradient."""
    mean, var = stored.mean.double().contiguous(), stored.var.double().contiguous()
    y = torch.empty_like(x)
    arguments, alive = _call(x, recipe, weight, bias, mean, var)
    _core.evaluate(*arguments, _pointer(residual), y.data_ptr())
    del alive
    return y


def can_update(stored: Moments, batch: Moments, momentum: float | Tensor) -> bool:
    """Whether `update_` can write these statistics: plain float32 or float64 on this CPU, seen by nobody else."""
    mean, var, count = stored
    return (
        WHY_NOT is None
        and isinstance(momentum, float | int)
        and isinstance(batch.count, int)
        and all(type(t) is Tensor and t.device.type == "cpu" and t.is_contiguous() for t in (mean, var, batch.mean))
        and mean.dtype == var.dtype
        and mean.dtype in (torch.float32, torch.float64)
        and batch.mean.dtype == torch.float64
        and (not isinstance(count, Tensor) or (type(count) is Tensor and count.dtype == torch.int64))
        and not (torch.compiler.is_compiling() or is_exporting() or is_watched())
    )


def update_(stored: Moments, batch: Moments, momentum: float) -> None:
    """Move stored statistics towards a batch's mean and unbiased variance, and count it."""
    count = stored.count
    assert isinstance(batch.count, int)
    _core.update(
        batch.mean.numel(),
        batch.count,
        momentum,
        batch.mean.data_ptr(),
        batch.var.data_ptr(),
        stored.mean.data_ptr(),
        stored.var.data_ptr(),
        _TYPES[stored.mean.dtype],
        count.data_ptr() if isinstance(count, Tensor) else 0,
    )
    for written in (stored.mean, stored.var, *([count] if isinstance(count, Tensor) else [])):
        if not written.is_inference():
            torch.autograd.graph.increment_version(written)  # as an operator's in-place write would
