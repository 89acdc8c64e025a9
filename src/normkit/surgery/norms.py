"""The norm layers of a model, and the statistics they store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from normkit.moments import Moments
from normkit.named_layers import named_layers
from normkit.spec import NormSpec, describe

# What norms call their state, torch's, ours and others'.
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Norm(NamedTuple):
    """A norm layer, its name in the model, and what it does."""

    name: str
    layer: nn.Module
    spec: NormSpec


def norms(model: nn.Module) -> list[Norm]:
    """Every norm layer of a model once, the model itself included."""
    described = [(name, layer, describe(layer)) for name, layer in named_layers(model)]
    return [Norm(name, layer, spec) for name, layer, spec in described if spec is not None]


def unknown_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that are norms by their names, and nothing we know; what has layers with state inside is a block."""
    for name, layer in named_layers(model):
        is_called_one = re.search("[Nn]orm|NORM|BN", type(layer).__name__) is not None
        if is_called_one and describe(layer) is None and not any(child.state_dict() for child in layer.children()):
            yield name, layer


def stored_moments(layer: nn.Module) -> Moments | None:
    """The statistics that a layer normalizes with in evaluation; None if it has none, or not one per channel."""
    mean, var = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or mean.dim() != 1 or mean.shape != var.shape:
        return None
    return Moments(mean, var, 0)
