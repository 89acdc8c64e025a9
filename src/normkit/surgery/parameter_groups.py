"""Which parameters weight decay is for, decided by what a layer is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from normkit.errors import ArgumentError
from normkit.named_layers import display_name
from normkit.surgery.norms import survey

DECAYED, EXEMPT, LEFT_OUT = "decayed", "not decayed", "left out"

# What a parameter can be to its layer.
WEIGHT, BIAS, AFFINE, EMBEDDING, SCALE = "weight", "bias", "gamma or beta", "embedding", "scale or shift"

# Layers whose weight multiplies a vector, whatever its shape: that of nn.Linear(1, 8) is no scale.
_LINEAR = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


class Placed(NamedTuple):
    """A parameter, the group that it is in, and why."""

    name: str
    group: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class ParameterGroups(list[dict[str, Any]]):
    """Groups for an optimizer; printed, they say why each parameter is where it is.

    Attributes:
        placed: every parameter of the model once, in the model's order; the group of those that need no gradient is
            "left out".
    """

    def __init__(self, groups: Iterable[dict[str, Any]], placed: Iterable[Placed]) -> None:
        super().__init__(groups)
        self.placed = tuple(placed)

    def __str__(self) -> str:
        lines = []
        for title in (DECAYED, EXEMPT, LEFT_OUT):
            members = [one for one in self.placed if one.group == title]
            options = next((_options(group) for group in self if group["name"] == title), "")
            if members:
                lines += [f"{title}{options}, {len(members)}:", *(f"  {one}" for one in members)]
        return "\n".join(lines)


def parameter_groups(
    model: nn.Module,
    weight_decay: float = 0.01,
    lr: float | None = None,
    *,
    embeddings: bool = True,
    scales: bool = False,
) -> ParameterGroups:
    """Groups for an optimizer, in which weight decay acts on weights and not on norms and biases.

    What a parameter is follows from the layer that has it, not from its name: gamma and beta are those of the norms
    that `describe` knows, from whatever library, and of layers that are norms by the names of their classes. A
    parameter that several layers share is decayed if all of them would. Parameters that need no gradient are left out;
    so that they can be trained later, set requires_grad first. What a model excludes itself, by a method
    `no_weight_decay` as timm's have it, is not decayed.

        optimizer = torch.optim.AdamW(nk.parameter_groups(model, weight_decay=0.05), lr=1e-3)

    Args:
        model: any model.
        weight_decay: of the weights.
        lr: the learning rate of both groups; without it, the optimizer's.
        embeddings: whether embeddings are decayed: tables of `nn.Embedding`, and tokens and positions that a model
            adds to its input.
        scales: whether learned scales that are no norm's are decayed: one number, or one for each channel.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"parameter_groups needs a torch.nn.Module; got a {type(model).__name__}.")
    _must_be_a_number("weight_decay", weight_decay)
    if lr is not None:
        _must_be_a_number("lr", lr)
    roles = _Roles(model, embeddings, scales)
    placed = [Placed(name, *roles.place(name, parameter)) for name, parameter in model.named_parameters()]
    rate = {} if lr is None else {"lr": lr}
    groups = []
    for title, decay in ((DECAYED, weight_decay), (EXEMPT, 0.0)):
        members = [model.get_parameter(one.name) for one in placed if one.group == title]
        if members:
            groups.append({"params": members, "weight_decay": decay, **rate, "name": title})
    if not groups:
        raise ArgumentError(f"{type(model).__name__} has no parameter that needs a gradient: nothing can be trained.")
    return ParameterGroups(groups, placed)


class _Roles:
    """What each parameter of a model is to the layers that have it."""

    def __init__(self, model: nn.Module, embeddings: bool, scales: bool) -> None:
        self._is_decayed = {WEIGHT: True, EMBEDDING: embeddings, SCALE: scales}
        found = survey(model)
        with_affine = {id(norm.layer) for norm in found.norms if norm.spec.has_gamma}
        with_affine |= {id(layer) for layer in found.unknown.values()}
        self._roles: dict[int, list[tuple[str, str]]] = {}
        for path, layer in model.named_modules():
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                if is_lazy(parameter):
                    raise ArgumentError(f"{path}.{name} has no shape yet: run a batch through the model first.")
                role = AFFINE if id(layer) in with_affine else _role(layer, name, parameter)
                whose = f"{role} of {display_name(path)} ({type(layer).__name__})"
                self._roles.setdefault(id(parameter), []).append((role, whose))
        self._excluded = _excluded(model)

    def place(self, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        """The group of a parameter, and the reason."""
        if not parameter.requires_grad:
            return LEFT_OUT, "needs no gradient"
        if any(fnmatchcase(name, pattern) for pattern in self._excluded):
            return EXEMPT, "the model's no_weight_decay() has it"
        roles = self._roles[id(parameter)]
        exempt = [whose for role, whose in roles if not self._is_decayed.get(role, False)]
        return (EXEMPT, exempt[0]) if exempt else (DECAYED, roles[0][1])


def _role(layer: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """What a parameter of a layer that is no norm is for."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return EMBEDDING
    if isinstance(layer, _LINEAR) and "weight" in name and not name.endswith("weight_g"):
        return WEIGHT
    if "bias" in name:
        return BIAS
    if parameter.dim() > 1 and (parameter.shape[0] == 1 or "embed" in name):
        return EMBEDDING
    return WEIGHT if sum(size > 1 for size in parameter.shape) > 1 else SCALE


def _excluded(model: nn.Module) -> list[str]:
    """The names that a model, or a part of it, excludes from weight decay."""
    found = []
    for path, part in model.named_modules():
        method = getattr(part, "no_weight_decay", None)
        if callable(method):
            found += [f"{path}.{name}" if path else name for name in method()]
    return found


def _must_be_a_number(argument: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
        raise ArgumentError(f"{argument} must be a number, 0 or more; got {given!r}.")


def _options(group: dict[str, Any]) -> str:
    rate = f", lr {group['lr']:g}" if "lr" in group else ""
    return f" (weight decay {group['weight_decay']:g}{rate})"
