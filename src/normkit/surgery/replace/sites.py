"""The norms of a model, each with the shapes of its inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.hooks import hooked
from normkit.snapshot import untouched
from normkit.spec import NormSpec
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Skip
from normkit.surgery.parity import run_example
from normkit.surgery.replace.history import formers

Shapes = dict[int, list[tuple[int, ...]]]


class Site(NamedTuple):
    """A norm layer, what it does, and the shapes of its inputs on the example; no shapes without an example.

    `gets_more` says that on the example it was called with other tensors besides its input.
    """

    name: str
    layer: nn.Module
    spec: NormSpec
    shapes: list[tuple[int, ...]]
    gets_more: bool = False

    @property
    def class_name(self) -> str:
        """The name of the layer's class."""
        return type(self.layer).__name__

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """The sizes of the last dimensions that it normalizes: by the layer, or by the example where it takes any."""
        shape = self.spec.normalized_shape
        return (self._size_seen(-1),) if shape is None else shape

    @property
    def channels(self) -> int:
        """The number of gammas that it has, or would have if it were affine."""
        if self.spec.is_over_last:
            return self.normalized_shape[0]
        return self._size_seen(1) if self.spec.num_features is None else self.spec.num_features

    def _size_seen(self, dim: int) -> int:
        sizes = {shape[dim] for shape in self.shapes}
        if len(sizes) != 1:
            raise Skip("it takes inputs of any size" + (", and gets several" if sizes else "; pass example="))
        return sizes.pop()

    @property
    def is_frozen(self) -> bool:
        """Whether it is a frozen batch norm, ours or another library's."""
        return self.spec.evaluates_as_batch_norm and not isinstance(self.layer, _BatchNorm)

    @property
    def has_batch_statistics(self) -> bool:
        """Whether it normalizes across examples, or did before it was frozen."""
        return "N" in self.spec.over

    @property
    def ranks(self) -> list[int]:
        """The ranks of the inputs on the example."""
        return sorted({len(shape) for shape in self.shapes})

    @property
    def positions(self) -> int | None:
        """The smallest number of positions among the inputs on the example; None without an example."""
        return min((math.prod(shape[2:]) for shape in self.shapes), default=None)

    def dimensions(self) -> int:
        """The number of dimensions of the positions, the 2 of BatchNorm2d: by the example, or else by the class."""
        if self.spec.is_over_last:
            self._need_vectors()
            return 1
        says = _dimensions_of(self.layer)
        if isinstance(self.layer, _InstanceNorm) and says is not None and says + 1 in self.ranks:
            raise Skip("its inputs have no batch dimension")
        seen = sorted({max(1, rank - 2) for rank in self.ranks}) or ([] if says is None else [says])
        if not seen:
            raise Skip(f"a {self.class_name} does not say how many dimensions its inputs have; pass example=")
        if len(seen) > 1 or not 1 <= seen[0] <= 3:
            raise Skip(f"its inputs have {' and '.join(map(str, self.ranks))} dimensions; no one class takes them")
        return seen[0]

    def _need_vectors(self) -> None:
        if not self.shapes:
            raise Skip("it normalizes the last dimension, and may do so over positions; pass example=")
        if self.ranks != [2] or len(self.normalized_shape) > 1:
            raise Skip("its inputs have their channels last, and positions before them")


def sites(model: nn.Module, norms: Sequence[Norm], example: Any = None, forward: Forward | None = None) -> list[Site]:
    """The sites of a model's norms; with an example, each with the shapes of its inputs in evaluation."""
    seen: Shapes = {id(norm.layer): [] for norm in norms}
    crowded: set[int] = set()

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tensors_in((args, kwargs))
        if given:
            seen[id(layer)].append(tuple(given[0].shape))
        if len(given) > 1:
            crowded.add(id(layer))

    if example is not None:
        with untouched(model), in_evaluation(model), hooked(before=[(norm.layer, record) for norm in norms]):
            run_example(model, example, forward)
    return [Site(*norm, shapes=seen[id(norm.layer)], gets_more=id(norm.layer) in crowded) for norm in norms]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor of a call: a layer's input."""
    return next(iter(tensors_in((args, kwargs))), None)


def _dimensions_of(layer: nn.Module) -> int | None:
    """The 2 in the name BatchNorm2d: of the class, of one that it derives from, or of what the layer was before."""
    for kind in (*type(layer).__mro__, *(former["class"] for former in formers(layer))):
        says = re.search(r"([123])d$", kind.__name__)
        if says:
            return int(says[1])
    return None
