"""A model's whole state: what torch finds, and the layers in plain containers, which it does not find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.errors import ArgumentError
from normkit.named_layers import named_layers
from normkit.surgery.checkpoint.file import CheckpointError

State = dict[str, Any]  # tensors, and what get_extra_state returns


def state_of(model: nn.Module) -> State:
    """A model's state_dict, and that of the layers which it keeps in plain lists and dictionaries."""
    state = dict(model.state_dict())
    for name, layer in _hidden(model):
        layer._save_to_state_dict(state, f"{name}.", False)
    check_has_values(state)
    return state


def fill(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the entries of a state into a model; each layer loads its own."""
    for name, layer in _hidden(model):
        own: State = {}
        layer._save_to_state_dict(own, "", False)
        layer.load_state_dict({key: state[f"{name}.{key}"] for key in own if f"{name}.{key}" in state}, strict=False)
    current = model.state_dict()  # not a new dictionary: this one carries the versions of the layers
    for key in list(current):
        if key in state:
            current[key] = state[key]
        else:
            del current[key]
    model.load_state_dict(current, strict=False)


def _hidden(model: nn.Module) -> list[tuple[str, nn.Module]]:
    seen = {id(module) for module in model.modules()}
    return [(name, layer) for name, layer in named_layers(model) if id(layer) not in seen]


def check_has_values(state: Mapping[str, Any]) -> None:
    """Raise if a tensor of the state has no values yet."""
    for key, tensor in state.items():
        if is_lazy(tensor):
            raise ArgumentError(f"{key} has no shape yet: run a batch through the model, as its lazy layers need.")
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise ArgumentError(
                f"{key} is on the meta device, without values: call model.to_empty(device='cpu') and initialize it."
            )


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state; raise if a file cannot hold one of them."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        kind = type(tensor.detach()).__name__ if tensor.layout == torch.strided else str(tensor.layout)
        if kind != "Tensor":
            raise CheckpointError(f"{key} is a {kind}; safetensors holds plain, dense tensors. Convert it first.")
    return tensors


def extra_of(state: Mapping[str, Any]) -> State:
    """The entries that are not tensors; raise if JSON cannot hold one of them."""
    extra = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in extra.items():
        if not _is_json(value):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}, which only a pickle could hold, and none is written here. Let "
                "get_extra_state return a tensor, or numbers, strings, lists and dictionaries."
            )
    return extra


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
