"""Whether a model still computes what it did, and the first layer that does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import Forward, feed, in_evaluation, tensors_in
from normkit.errors import NormkitError
from normkit.hooks import AfterForward, hooked
from normkit.named_layers import named_layers
from normkit.snapshot import equal_values, untouched
from normkit.surgery.result import Parity

# Units in the last place of the largest value by which rounding alone may move the output of one layer: kernels sum in
# different orders, and their errors grow with the square root of a sum's length, a few thousand terms at most.
ROUNDING = 64

# How far outputs may be apart, over their largest magnitude: other kernels round in another order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Trace(NamedTuple):
    """The outputs of a model on an example, and those of its layers in the order they ran."""

    outputs: list[Tensor]
    layers: list[tuple[str, list[Tensor]]]


class ExampleError(NormkitError, RuntimeError):
    """A model that does not run on the example it was given."""


def trace(model: nn.Module, example: Any, forward: Forward | None = None) -> Trace:
    """Run a model on an example, in evaluation, and leave it as it was."""
    layers: list[tuple[str, list[Tensor]]] = []

    def record(name: str) -> AfterForward:
        return lambda layer, args, kwargs, output: layers.append((name, [_copy(t) for t in tensors_in(output)]))

    innermost = [(name, layer) for name, layer in named_layers(model) if set(layer._modules.values()) <= {None}]
    recording = hooked(after=[(layer, record(name)) for name, layer in innermost])
    with untouched(model), in_evaluation(model), recording:
        outputs = run_example(model, example, forward)
    return Trace([_copy(tensor) for tensor in tensors_in(outputs)], layers)


def run_example(model: nn.Module, example: Any, forward: Forward | None = None) -> Any:
    """Run a model on an example; the error of a model that does not run says what it was given."""
    try:
        return feed(model, example, forward)
    except NormkitError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(example)) or type(example).__name__
        raise ExampleError(
            f"{type(model).__name__} does not run on the example ({shapes}): {type(error).__name__}: {error} "
            "A tensor is the input, of a tuple what forward requires; forward=lambda model, batch: ... replaces that."
        ) from error


def compare(before: Trace, after: Trace, meant: Collection[str] = ()) -> Parity:
    """How far the outputs moved, and the first layer that did, except for those that were meant to."""
    max_abs, max_rel = _differences(before.outputs, after.outputs)
    return Parity(max_abs, max_rel, _first(before, after, meant) if max_abs > 0 else None)


def _first(before: Trace, after: Trace, meant: Collection[str]) -> str | None:
    found = _by_call(after)
    for (name, call), tensors in _by_call(before).items():
        others = found.get((name, call))
        if others is None or name in meant:
            continue
        if _differences(tensors, others)[1] > ROUNDING * _eps(tensors):
            return name
    return None


def _by_call(trace: Trace) -> dict[tuple[str, int], list[Tensor]]:
    """The outputs of layers in their order, by the name of the layer and the number of its earlier calls."""
    calls: Counter[str] = Counter()
    found = {}
    for name, tensors in trace.layers:
        found[name, calls[name]] = tensors
        calls[name] += 1
    return found


def _differences(before: list[Tensor], after: list[Tensor]) -> tuple[float, float]:
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf, math.inf
    pairs = [difference(a, b) for a, b in zip(before, after, strict=True)]
    return max((d for d, _ in pairs), default=0.0), max((r for _, r in pairs), default=0.0)


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors of one shape, absolute and relative to the largest value of the first."""
    if a.numel() == 0:
        return 0.0, 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(device=a.device, dtype=wide)
    gaps = torch.where(equal_values(a, b), 0.0, (a - b).abs())
    gap = math.inf if gaps.isnan().any() else gaps.max().item()
    if gap == 0:
        return 0.0, 0.0
    largest = a.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return gap, gap / largest if largest else math.inf


def tolerance(model: nn.Module, outputs: Sequence[Tensor] = ()) -> float:
    """How far outputs may be apart, by the coarsest type among them and the model's parameters."""
    types = {tensor.dtype for tensor in (*outputs, *model.parameters())}
    return max((TOLERANCES[dtype] for dtype in types if dtype in TOLERANCES), default=TOLERANCES[torch.float32])


def _eps(tensors: list[Tensor]) -> float:
    return max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, which a later in-place layer does not change."""
    return tensor.detach().clone()
