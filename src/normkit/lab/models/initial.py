"""Initial weights: drawn here and not left to torch, because nets without a norm depend on them."""

from __future__ import annotations

from math import prod, sqrt
from typing import Literal, TypeVar, get_args

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from normkit.errors import ArgumentError

InitName = Literal["he", "glorot", "gaussian"]
Model = TypeVar("Model", bound=nn.Module)


def initialize_(model: nn.Module, init: InitName = "he", scale: float = 1.0, *, seed: int | None = None) -> None:
    """Draw all weights of linear layers and convolutions from normal distributions, and set their biases to zero.

    Standard deviation: "he" scale * sqrt(2 / fan_in), "glorot" scale * sqrt(2 / (fan_in + fan_out)), "gaussian" scale.
    Norms keep their gamma of one and beta of zero. With `seed`, torch's random state starts from it, so that nets with
    the same layers get the same weights, whatever was drawn before.
    """
    if init not in get_args(InitName):
        raise ArgumentError(f"init must be one of {', '.join(get_args(InitName))}; got {init!r}.")
    if not scale > 0:
        raise ArgumentError(f"The initial scale must be more than 0; got {scale}. The usual one is 1.")
    if seed is not None:
        torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | _ConvNd):
            nn.init.normal_(module.weight, 0.0, scale * _std(init, *_fans(module)))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def initialized(model: Model, init: InitName | None, scale: float) -> Model:
    """Return the model with its weights drawn; with None they are left to a later `initialize_`."""
    if init is not None:
        initialize_(model, init, scale)
    return model


def _std(init: InitName, fan_in: float, fan_out: float) -> float:
    if init == "gaussian":
        return 1.0
    return sqrt(2 / (fan_in if init == "he" else fan_in + fan_out))


def _fans(layer: nn.Linear | _ConvNd) -> tuple[float, float]:
    """How many inputs an output depends on, and how many outputs an input reaches; borders and strides are ignored."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    taps = prod(layer.kernel_size) / layer.groups
    return layer.in_channels * taps, layer.out_channels * taps
