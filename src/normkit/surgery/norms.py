"""The norm layers of a model, and the statistics they store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from normkit.layers.split import SplitBatchNorm2d
from normkit.moments import Moments
from normkit.named_layers import display_name, named_layers
from normkit.spec import NormSpec, describe

# What norms call their state: torch's, ours and those of other libraries.
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

UNKNOWN = "is not a norm we know"


class Norm(NamedTuple):
    """A norm layer, its name in the model, and what it does."""

    name: str
    layer: nn.Module
    spec: NormSpec

    @property
    def title(self) -> str:
        """What to call it in errors: its name and its class."""
        return f"{display_name(self.name)} ({type(self.layer).__name__})"


class Survey(NamedTuple):
    """The norm layers of a model.

    Attributes:
        norms: the layers that `describe` knows.
        unknown: those that it does not know, and that are norms by the names of their classes.
    """

    norms: list[Norm]
    unknown: dict[str, nn.Module]

    def without_parts(self) -> Survey:
        """The norms but for those that others are made of: what becomes of these is decided with the whole."""
        parts = {id(part) for norm in self.norms for part in parts_of(norm.layer)}
        return Survey([norm for norm in self.norms if id(norm.layer) not in parts], self.unknown)


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """The auxiliary norms that a norm of ours has for parts of a batch in training."""
    return list(layer.aux_bn) if isinstance(layer, SplitBatchNorm2d) else []


def survey(model: nn.Module) -> Survey:
    """Every norm layer of a model once, the model itself included."""
    found = Survey([], {})
    for name, layer in named_layers(model):
        spec = describe(layer)
        if spec is not None:
            found.norms.append(Norm(name, layer, spec))
        elif _is_called_a_norm(layer):
            found.unknown[name] = layer
    return found


def norms(model: nn.Module) -> list[Norm]:
    """The norm layers of a model that `describe` knows."""
    return survey(model).norms


def channels_second(norm: Norm, x: Tensor) -> Tensor:
    """A norm's input, or anything of its rank, with the channels of a batch norm in the second dimension."""
    dim = norm.spec.channel_dim
    return x if dim == 1 or not -x.dim() < dim < x.dim() else x.movedim(dim, 1)


def state_prefixes(model: nn.Module, layers: Iterable[nn.Module]) -> tuple[str, ...]:
    """What the entries of these layers begin with in a model's state: a layer that two parents share has two names."""
    wanted = {id(layer) for layer in layers}
    named = [*model.named_modules(remove_duplicate=False), *named_layers(model)]
    return tuple(dict.fromkeys(f"{name}." if name else "" for name, layer in named if id(layer) in wanted))


def _is_called_a_norm(layer: nn.Module) -> bool:
    """Whether a class is called a norm; one that holds layers with state is a block with a norm in its name."""
    is_called_one = re.search("[Nn]orm|NORM|BN", type(layer).__name__) is not None
    return is_called_one and not any(child.state_dict() for child in layer.children())


def stored_moments(layer: nn.Module) -> Moments | None:
    """The statistics that a layer normalizes with in evaluation; None if it has none, or not one per channel."""
    mean, var = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or mean.dim() != 1 or mean.shape != var.shape:
        return None
    return Moments(mean, var, 0)
