"""The norms of a model, each with what is known about where it stands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.snapshot import untouched
from normkit.spec import NormSpec
from normkit.surgery.norms import norms
from normkit.surgery.parity import run_example
from normkit.surgery.replace.history import formers

Shapes = dict[int, list[tuple[int, ...]]]


class Refused(Exception):  # never leaves the surgery: it becomes a line of what was skipped
    """Why a layer is left as it is."""


class Site(NamedTuple):
    """A norm layer, what it does, and the shapes of its inputs on the example: none without one."""

    name: str
    layer: nn.Module
    spec: NormSpec
    shapes: list[tuple[int, ...]]

    @property
    def class_name(self) -> str:
        """What the layer's class is called."""
        return type(self.layer).__name__

    @property
    def is_over_last(self) -> bool:
        """Whether it normalizes the last dimensions, as LayerNorm and RMSNorm do."""
        return self.spec.kind in ("layer", "rms")

    @property
    def channels(self) -> int:
        """The number of gammas that it has, or would have."""
        if self.is_over_last:
            shape: tuple[int, ...] = self.layer.normalized_shape  # type: ignore[assignment]
            return shape[0]
        assert self.spec.num_features is not None
        return self.spec.num_features

    @property
    def ranks(self) -> list[int]:
        """The ranks of the inputs seen."""
        return sorted({len(shape) for shape in self.shapes})

    @property
    def positions(self) -> int | None:
        """The fewest positions that an example had, where any was seen."""
        return min((math.prod(shape[2:]) for shape in self.shapes), default=None)

    def dimensions(self) -> int:
        """How many dimensions the positions have, the 2 of BatchNorm2d: as seen, or as a class says."""
        if self.is_over_last:
            self._need_vectors()
            return 1
        says = _dimensions_of(self.layer)
        if isinstance(self.layer, _InstanceNorm) and says is not None and says + 1 in self.ranks:
            raise Refused("its inputs have no batch dimension")
        seen = sorted({max(1, rank - 2) for rank in self.ranks}) or ([] if says is None else [says])
        if not seen:
            raise Refused(f"a {self.class_name} does not say how many dimensions its inputs have; pass example=")
        if len(seen) > 1 or not 1 <= seen[0] <= 3:
            raise Refused(f"its inputs have {' and '.join(map(str, self.ranks))} dimensions; no one class takes them")
        return seen[0]

    def _need_vectors(self) -> None:
        if not self.shapes:
            raise Refused("it normalizes the last dimension, and may do so over positions; pass example=")
        if self.ranks != [2] or len(self.layer.normalized_shape) > 1:  # type: ignore[arg-type]
            raise Refused("its inputs have their channels last, and positions before them")


def sites(model: nn.Module, example: Any = None, forward: Forward | None = None) -> list[Site]:
    """Every norm of a model; with an example, each with the shapes it sees in evaluation."""
    found = norms(model)
    seen: Shapes = {id(norm.layer): [] for norm in found}
    if example is not None:
        with untouched(model), in_evaluation(model), _watching([norm.layer for norm in found], seen):
            run_example(model, example, forward)
    return [Site(*norm, shapes=seen[id(norm.layer)]) for norm in found]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a layer was called with."""
    return next(iter(tensors_in((args, kwargs))), None)


@contextmanager
def _watching(layers: list[nn.Module], into: Shapes) -> Iterator[None]:
    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor(args, kwargs)
        if x is not None:
            into[id(layer)].append(tuple(x.shape))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _dimensions_of(layer: nn.Module) -> int | None:
    """The 2 of a BatchNorm2d, of the class, of one that it derives from, or of what the layer was before."""
    for kind in (*type(layer).__mro__, *(former["class"] for former in formers(layer))):
        says = re.search(r"([123])d$", kind.__name__)
        if says:
            return int(says[1])
    return None
