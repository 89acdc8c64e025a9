"""One normalization layer on one input: ours and others', and what memory alone would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.bench.case import Effort, Result, over_ours
from normkit.bench.spread import Spread, ratio
from normkit.bench.timing import Step, interleave, prepare
from normkit.kernels import core, native

Mode = Literal["training", "forward", "evaluation"]  # forward and backward; the first of them; without a gradient
Layout = Literal["contiguous", "channels_last", "slice", "transposed", "every other"]
Extra = Literal["residual", "mask"]
Contestants = Mapping[str, Callable[[], nn.Module]]

LAYOUTS: tuple[Layout, Layout] = ("contiguous", "channels_last")

COPY, STREAMED, TRIAD = "copy", "streamed copy", "triad"
_CONTIGUOUS_LAYOUTS = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SHORT = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_KEPT = 0.75  # of the positions, by a mask


@dataclass(frozen=True)
class Input:
    """What a layer is called with: the shape, how it lies in memory, and the type."""

    shape: tuple[int, ...]
    layout: Layout = "contiguous"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        layout = "" if self.layout == "contiguous" else self.layout
        return " ".join(word for word in (",".join(map(str, self.shape)), layout, _SHORT[self.dtype]) if word)

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def layout_name(self) -> str:
        """NCHW and the like, if it is contiguous."""
        return _CONTIGUOUS_LAYOUTS[len(self.shape)] if self.layout == "contiguous" else self.layout

    def tensor(self) -> Tensor:
        """Return random numbers in this shape, type and layout."""
        n, c, *rest = self.shape
        match self.layout:
            case "channels_last":
                return self._random(*self.shape).contiguous(memory_format=_CHANNELS_LAST[len(self.shape)])
            case "slice":  # the first half of the channels of a larger tensor
                return self._random(n, 2 * c, *rest)[:, :c]
            case "transposed":  # a sequence of vectors, (N, L, C), seen as (N, C, L)
                return self._random(n, *rest, c).transpose(1, -1)
            case "every other":
                return self._random(n, c, *rest[:-1], 2 * rest[-1])[..., ::2]
            case _:
                return self._random(*self.shape)

    def mask(self) -> Tensor:
        """Return a mask of the positions, some of which it leaves out."""
        return torch.rand(self.shape[:1] + self.shape[2:]) < _KEPT

    def dense(self) -> Tensor:
        """Return as many random numbers in one piece of memory."""
        return self._random(*self.shape)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)


@dataclass(frozen=True)
class LayerCase:
    """A layer's step on random input, for every contestant that `layers` can build."""

    family: str
    input: Input
    layers: Contestants
    title: str = ""
    mode: Mode = "training"
    extras: tuple[Extra, ...] = ()  # what it is called with besides the input
    parameters: torch.dtype = torch.float32
    quick: bool = False
    tags: Mapping[str, object] = field(default_factory=dict)  # further facts, to pick cases by

    @property
    def name(self) -> str:
        """The title, the mode if it is not training, and the input."""
        mode = "" if self.mode == "training" else self.mode
        return " ".join(word for word in (self.title, mode, str(self.input)) if word)

    def measure(self, effort: Effort) -> Result:
        """Time the contestants and the memory limit, interleaved."""
        if effort.compiles:
            torch.compiler.reset()  # or what it learned of other shapes would make it compile for any
        builders = {
            name: partial(self.step, build)
            for name, build in self.layers.items()
            if effort.compiles or not is_compiled(name)
        }
        steps, errors = prepare(builders | {part: partial(self._limit_step, part) for part in self._limit_parts()})
        seconds = interleave(steps, effort.rounds)
        parts = {part: seconds.pop(part) for part in self._limit_parts()}
        backward = parts.pop(TRIAD, [0.0] * effort.rounds)
        limit = [min(copies) + rest for *copies, rest in zip(*parts.values(), backward, strict=True)]
        return Result(
            self.family,
            self.name,
            torch.get_num_threads(),
            self.facts(),
            effort.rounds,
            {name: Spread.of(values) for name, values in (seconds | {"limit": limit}).items()},
            over_ours(seconds),
            {name: ratio(values, limit) for name, values in seconds.items()},
            errors=errors,
        )

    def _limit_parts(self) -> list[str]:
        """A forward is a copy, of two ways the better one; a backward reads two tensors and writes one."""
        streamed = [STREAMED] if core.WHY_NOT is None and self.input.bytes % 64 == 0 else []  # whole cache lines
        return [COPY, *streamed, *([TRIAD] if self.mode == "training" else [])]

    def _limit_step(self, part: str) -> Step:
        source, other, target = self.input.dense(), self.input.dense(), self.input.dense()
        if part == STREAMED:
            return partial(native.copy_past_cache, source, target)
        return partial(target.copy_, source) if part == COPY else partial(torch.add, source, other, out=target)

    def step(self, build: Callable[[], nn.Module]) -> Step:
        """Return one step of a contestant, on its own copy of everything."""
        layer, x = build().to(self.parameters), self.input.tensor()
        layer.train(self.mode != "evaluation")
        extras = {name: self.input.mask() if name == "mask" else self.input.tensor() for name in self.extras}
        call = partial(layer, x, **extras)
        if self.mode == "evaluation":
            return partial(_evaluate, call)
        leaves = [x, *(t for name, t in extras.items() if name == "residual")]
        for leaf in leaves:
            leaf.requires_grad_()
        if self.mode == "forward":
            return call
        return partial(_train, call, torch.randn_like(x), [*leaves, *layer.parameters()])

    def facts(self) -> dict[str, Any]:
        """What the case is, for those who pick cases by it."""
        return {
            "title": self.title,
            "shape": list(self.input.shape),
            "layout": self.input.layout_name,
            "dtype": str(self.input.dtype).removeprefix("torch."),
            "mode": self.mode,
            "input_bytes": self.input.bytes,
            **self.tags,
        }


def is_compiled(contestant: str) -> bool:
    """Whether a contestant is one of torch.compile's."""
    return contestant.startswith("compile")


def _evaluate(call: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        call()


def _train(call: Callable[[], Tensor], gradient: Tensor, leaves: list[Tensor]) -> None:
    """Forward and backward, with new memory for the output and all gradients, as after `zero_grad()`."""
    for leaf in leaves:
        leaf.grad = None
    call().backward(gradient)
