"""What a probe is: it chooses layers, sees their forwards at recorded steps, and turns what it saw into numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.batches import tensors_in
from normkit.errors import ArgumentError, did_you_mean
from normkit.named_layers import named_layers
from normkit.spec import describe

Numbers = dict[str, Any]
Reading = tuple[str, Numbers]  # a layer's name, "" for the model as a whole, and what was measured of it


@dataclass
class Watched:
    """What probes are shown of a run: the model, its optimizer if there is one, and the steps taken so far."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: int = 0


class Probe:
    """Measures a model at some steps of its training, and never changes it.

    A subclass says which layers it measures (`chooses`), and overrides what it needs of the rest. At a recorded step
    come, in this order: `saw`, for the first forward of each of its layers; `before_update`, with the gradients there;
    `after_update`, with the parameters moved. The last two yield what is recorded.

    Args:
        layers: names, or shell patterns of names, of the layers to measure; without it, all that `chooses`.
    """

    needs_optimizer: ClassVar[bool] = False  # it compares what is before an update with what is after

    def __init__(self, layers: str | Sequence[str] | None = None) -> None:
        self._asked = [layers] if isinstance(layers, str) else layers
        self.layers: list[tuple[str, nn.Module]] = []

    @property
    def name(self) -> str:
        """What its records are called."""
        return type(self).__name__

    def chooses(self, layer: nn.Module) -> bool:
        """Whether a layer is measured if none are named."""
        return False

    def begin(self, watched: Watched) -> None:
        """Find the layers; raise if one that was named is not there."""
        if self.needs_optimizer and watched.optimizer is None:
            raise ArgumentError(f"{self.name} compares parameters before and after a step: pass optimizer= to attach.")
        self.layers = chosen_layers(watched.model, self._asked, self)

    def saw(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take note of a layer's forward."""

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Yield what is known when the gradients are."""
        yield from ()

    def after_update(self, watched: Watched) -> Iterator[Reading]:
        """Yield what is known when the parameters have moved."""
        yield from ()

    def state(self) -> dict[str, Any]:
        """What it remembers from one recorded step to the next, by layer: tensors and numbers in lists."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class ForwardProbe(Probe):
    """A probe of what goes through layers: `measure` turns one forward into numbers."""

    def __init__(self, layers: str | Sequence[str] | None = None) -> None:
        super().__init__(layers)
        self._found: dict[str, Numbers] = {}

    def measure(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Numbers:
        """The numbers of one forward."""
        raise TypeError(f"{type(self).__name__} must define measure")

    def saw(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Measure it, without a gradient."""
        with torch.no_grad():
            self._found[name] = self.measure(name, layer, args, output)

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Yield what the forwards gave, in their order."""
        yield from self._found.items()
        self._found = {}


# ---- layers


def chosen_layers(model: nn.Module, asked: Sequence[str] | None, probe: Probe) -> list[tuple[str, nn.Module]]:
    """The layers that were named, or those that the probe chooses; raise if there are none."""
    layers = list(named_layers(model))
    if asked is None:
        found = [(name, layer) for name, layer in layers if probe.chooses(layer)]
        if not found and type(probe).chooses is not Probe.chooses:
            raise ArgumentError(
                f"{probe.name} finds no layer to measure in {type(model).__name__}. Name some with layers=."
            )
        return found
    for pattern in asked:
        if not any(fnmatchcase(name, pattern) for name, _ in layers):
            near = did_you_mean(pattern, [name for name, _ in layers if name])
            raise ArgumentError(
                f"{probe.name} is to measure {pattern!r}, and {type(model).__name__} has no such layer.{near} Layers "
                "are named as in named_modules()."
            )
    return [(name, layer) for name, layer in layers if any(fnmatchcase(name, pattern) for pattern in asked)]


def is_norm(layer: nn.Module) -> bool:
    """Whether a layer normalizes what goes through it."""
    spec = describe(layer)
    return spec is not None and spec.has_gamma and spec.kind != "local-response"


def has_weight(layer: nn.Module) -> bool:
    """Whether a layer multiplies by a matrix of weights: a linear layer or a convolution, whoever wrote it."""
    weight = getattr(layer, "weight", None)
    is_matrix = isinstance(weight, nn.Parameter) and weight.dim() > 1
    return is_matrix and not isinstance(layer, nn.Embedding | nn.EmbeddingBag) and not is_norm(layer)


def first_tensor(value: Any) -> Tensor:
    """The first tensor of numbers in what a layer got or gave, detached, and in at least single precision."""
    for tensor in tensors_in(value):
        if tensor.is_floating_point():
            return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    raise ArgumentError("it has no tensor of floating point numbers there. Name other layers with layers=.")


def by_channel(layer: nn.Module, t: Tensor) -> Tensor:
    """Values as (channels, all the rest); a vector is one channel."""
    if t.dim() < 2:
        return t.reshape(1, -1)
    spec = describe(layer)
    if spec is not None:
        return t.movedim(spec.channels_in(t.dim()), 0).flatten(1)
    return t.movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)


def rms(values: Tensor) -> float | None:
    """The root mean square of some values; None if there are none."""
    return values.square().mean().sqrt().item() if values.numel() else None
