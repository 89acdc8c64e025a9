"""One normalization layer on one input: ours and torch's, and what memory alone would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.bench.case import Effort, Result, over_ours
from normkit.bench.spread import Spread, ratio
from normkit.bench.timing import Step, interleave, prepare
from normkit.kernels import core, native

Mode = Literal["training", "forward", "evaluation"]  # forward and backward; the first of them; without a gradient
Layout = Literal["contiguous", "channels_last"]

COPY, STREAMED, TRIAD = "copy", "streamed copy", "triad"
_CONTIGUOUS_LAYOUTS = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class LayerCase:
    """A layer's step on random input, for every contestant that `layers` can build."""

    group: str
    shape: tuple[int, ...]
    layers: Mapping[str, Callable[[], nn.Module]]
    title: str = ""
    layout: Layout = "contiguous"
    dtype: torch.dtype = torch.float32
    mode: Mode = "training"
    quick: bool = False

    @property
    def name(self) -> str:
        """The title, the shape, and what is not the usual layout and type."""
        layout = "" if self.layout == "contiguous" else self.layout
        dtype = {torch.float32: "", torch.bfloat16: "bf16"}[self.dtype]
        return " ".join(word for word in (self.title, ",".join(map(str, self.shape)), layout, dtype) if word)

    def measure(self, effort: Effort) -> Result:
        """Time the contestants and the memory limit, interleaved."""
        if effort.compiles:
            torch.compiler.reset()  # or what it learned of other shapes would make it compile for any
        builders = {
            name: partial(self._step, build)
            for name, build in self.layers.items()
            if effort.compiles or not is_compiled(name)
        }
        steps, errors = prepare(builders | {part: partial(self._limit_step, part) for part in self._limit_parts()})
        seconds = interleave(steps, effort.rounds)
        parts = {part: seconds.pop(part) for part in self._limit_parts()}
        backward = parts.pop(TRIAD, [0.0] * effort.rounds)
        limit = [min(copies) + rest for *copies, rest in zip(*parts.values(), backward, strict=True)]
        return Result(
            self.group,
            self.name,
            torch.get_num_threads(),
            self.facts(),
            effort.rounds,
            {name: Spread.of(values) for name, values in (seconds | {"limit": limit}).items()},
            over_ours(seconds),
            {name: ratio(values, limit) for name, values in seconds.items()},
            errors=errors,
        )

    def tensor(self) -> Tensor:
        """Return random numbers in the case's shape, type and memory format."""
        values = torch.randn(self.shape).to(self.dtype)
        if self.layout == "channels_last":
            values = values.contiguous(memory_format=_CHANNELS_LAST[len(self.shape)])
        return values

    def _limit_parts(self) -> list[str]:
        """A forward is a copy, of two ways the better one; a backward reads two tensors and writes one."""
        whole_lines = math.prod(self.shape) * self.dtype.itemsize % 64 == 0
        streamed = [STREAMED] if core.WHY_NOT is None and whole_lines else []
        return [COPY, *streamed, *([TRIAD] if self.mode == "training" else [])]

    def _limit_step(self, part: str) -> Step:
        source, other, target = self.tensor(), self.tensor(), self.tensor()
        if part == STREAMED:
            return partial(native.copy_past_cache, source, target)
        return partial(target.copy_, source) if part == COPY else partial(torch.add, source, other, out=target)

    def _step(self, build: Callable[[], nn.Module]) -> Step:
        """Return one step of a contestant, on its own copy of everything."""
        layer, x = build(), self.tensor()
        layer.train(self.mode != "evaluation")
        if self.mode == "evaluation":
            return partial(_evaluate, layer, x)
        x.requires_grad_()
        if self.mode == "forward":
            return partial(layer, x)
        return partial(_train, layer, x, self.tensor(), [x, *layer.parameters()])

    def facts(self) -> dict[str, Any]:
        """What the case is, for those who pick cases by it."""
        contiguous = _CONTIGUOUS_LAYOUTS[len(self.shape)]
        return {
            "title": self.title,
            "shape": list(self.shape),
            "layout": contiguous if self.layout == "contiguous" else self.layout,
            "dtype": str(self.dtype).removeprefix("torch."),
            "mode": self.mode,
            "input_bytes": math.prod(self.shape) * self.dtype.itemsize,
        }


def is_compiled(contestant: str) -> bool:
    """Whether a contestant is one of torch.compile's."""
    return contestant.startswith("compile")


def _evaluate(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def _train(layer: nn.Module, x: Tensor, gradient: Tensor, leaves: list[Tensor]) -> None:
    """Forward and backward, with new memory for the output and all gradients, as after `zero_grad()`."""
    for leaf in leaves:
        leaf.grad = None
    layer(x).backward(gradient)
