"""The weights whose scale a norm takes out again, and how their norms grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.named_layers import named_layers

# Nodes of the graph for the backward, by name. Those that multiply by a weight:
_MULTIPLIES = frozenset({"Convolution", "MkldnnConvolution", "Addmm", "Mm", "Bmm", "Linear", "MkldnnLinear"})
# Those that lay a tensor out anew, or give it another type:
_LAYS_OUT = frozenset({
    "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose",
    "UnsafeView", "Unsqueeze", "View",
})  # fmt: skip
# Those through which a positive factor passes as it is:
_PASSES_SCALE = _LAYS_OUT | {"Cat", "LeakyRelu", "Mean", "NativeDropout", "Relu"}
_POOLS = ("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "MaxPool")  # followed by the number of dimensions
_FARTHEST = 64  # nodes


class Growth(NamedTuple):
    """Weights of a layer: their norm at the beginning and now, and the norm layer after them."""

    layer: str
    parameter: nn.Parameter
    before: str
    start: float
    end: float

    @property
    def ratio(self) -> float:
        """How many times the norm has grown."""
        return self.end / self.start


class Weights:
    """All weights of a model, their norms when the ledger was opened, and which of them a norm was seen to follow."""

    def __init__(self, model: nn.Module) -> None:
        self._owned: dict[int, tuple[str, nn.Parameter]] = {}
        for name, layer in named_layers(model):
            for parameter in layer._parameters.values():
                if parameter is not None and not is_lazy(parameter) and parameter.dim() > 1:
                    self._owned.setdefault(id(parameter), (name, parameter))
        self._start = dict(zip(self._owned, _norms([p for _, p in self._owned.values()]), strict=True))
        self._followed: dict[int, str] = {}

    def precede(self, norm: str, x: Tensor) -> None:
        """Note the weights that a norm's input is proportional to."""
        for tensor in _weights_of(x.grad_fn):
            if id(tensor) in self._owned:
                self._followed.setdefault(id(tensor), norm)

    def into(self, norm: str) -> list[nn.Parameter]:
        """The weights that a norm was seen to follow."""
        return [self._owned[key][1] for key, name in self._followed.items() if name == norm]

    def growth(self) -> list[Growth]:
        """How the weights that a norm follows have grown; without those that began at zero."""
        keys = [key for key in self._followed if self._start[key] > 0]
        ends = _norms([self._owned[key][1] for key in keys])
        return [
            Growth(*self._owned[key], self._followed[key], self._start[key], end)
            for key, end in zip(keys, ends, strict=True)
        ]


def _norms(parameters: list[nn.Parameter]) -> list[float]:
    with torch.no_grad():
        return [float(norm) for norm in torch._foreach_norm([p.detach() for p in parameters])] if parameters else []


def _weights_of(node: Any) -> Iterator[Tensor]:
    """The weights of the layers that a tensor comes from, as long as all that lies between lets their scale pass."""
    waiting, seen = [node], 0
    while waiting and seen < _FARTHEST:
        node, seen = waiting.pop(), seen + 1
        if _name(node) in _MULTIPLIES:
            yield from _factors(node)
        elif _passes_scale(node):
            waiting.extend(after for after, _ in node.next_functions if after is not None)


def _passes_scale(node: Any) -> bool:
    name = _name(node)
    if name in ("Mul", "Div"):  # by what has no gradient: dropout, a constant
        return sum(after is not None for after, _ in node.next_functions) == 1
    return name in _PASSES_SCALE or name.startswith(_POOLS)


def _factors(node: Any) -> Iterator[Tensor]:
    """What a product was made of: the leaves that it takes as they are, or laid out anew."""
    for factor, _ in node.next_functions:
        while _name(factor) in _LAYS_OUT:
            factor = factor.next_functions[0][0]
        leaf = getattr(factor, "variable", None)  # of the node that adds to a leaf's gradient
        if leaf is not None:
            yield leaf


def _name(node: Any) -> str:
    """The operator that a node is the backward of; empty if there is none."""
    return "" if node is None else str(node.name()).partition("Backward")[0]
