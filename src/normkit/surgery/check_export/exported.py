"""The norms in an exported graph, and the layers of the model that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from normkit.surgery.check_export.written_out import HalfNorms
from normkit.surgery.norms import Norm

ROLES = ("weight", "bias", "running_mean", "running_var")


class ExportedNorm(NamedTuple):
    """A node that normalizes.

    Attributes:
        layer: the name of its layer in the graph itself, if there is one.
        op: the operator.
        eps: as in the graph; None if it is not there.
        momentum: weight of the new value; None if it is not in the graph.
        trains: whether it normalizes with the statistics of the batch it is given.
        tensors: weight, bias, running_mean and running_var, where the graph holds their values.
    """

    layer: str | None
    op: str
    eps: float | None
    momentum: float | None
    trains: bool
    tensors: Mapping[str, Tensor]


class MissingOperator(NamedTuple):
    """An operator that a graph would need for a norm, the opset that brings it, and the older one that it has."""

    operator: str
    needs: int
    has: int


class Exported(Protocol):
    """A graph that can be read and run."""

    what: str
    """What to call it in messages."""
    is_trainable: bool
    """Whether it may still be trained, so that it should be in the mode that the model is in."""

    @property
    def is_quantized(self) -> bool:
        """Whether it rounds to integers, so that its outputs differ from the model's by more than rounding."""

    def norms(self) -> Iterable[ExportedNorm]:
        """The nodes that normalize."""

    def half_norms(self) -> HalfNorms:
        """Norms written out as arithmetic, with their statistics in a half type."""

    def missing_operator(self, kind: str) -> MissingOperator | None:
        """The operator for norms of this kind (as in a NormSpec), if the graph is too old to have it."""

    def written(self) -> set[str]:
        """Names of the buffers that a run of the graph writes."""

    def runner(self) -> nn.Module:
        """A module that runs the graph, as precisely as the graph can be run."""


def matched(
    nodes: Iterable[ExportedNorm], model: nn.Module, layers: list[Norm]
) -> Iterator[tuple[ExportedNorm, Norm | None]]:
    """Each node with the layer that it comes from: by name, else by the values it holds."""
    known = {norm.name: norm for norm in layers}
    by_identity = {id(norm.layer): norm for norm in layers}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared layer may appear under any of its names
        if id(module) in by_identity:
            known[name] = by_identity[id(module)]
    for node in nodes:
        found = None if node.layer is None else known.get(node.layer)
        yield node, found or _by_values(node, layers)


def _by_values(node: ExportedNorm, layers: list[Norm]) -> Norm | None:
    if not node.tensors:
        return None
    found = [norm for norm in layers if all(_holds(norm.layer, role, value) for role, value in node.tensors.items())]
    return found[0] if len(found) == 1 else None


def _holds(layer: nn.Module, role: str, value: Tensor) -> bool:
    own: Any = getattr(layer, role, None)
    return (
        isinstance(own, Tensor) and own.shape == value.shape and torch.equal(own.detach().cpu().to(value.dtype), value)
    )
