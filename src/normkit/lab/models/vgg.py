"""VGG-like nets (Simonyan & Zisserman 2014) for small images."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

from torch import nn

from normkit.activations import ActivationName
from normkit.errors import ArgumentError
from normkit.lab.models.initial import InitName, initialized
from normkit.lab.models.units import Finish, Norm, conv_unit

VGGDepth = Literal[11, 13, 16, 19]

_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (1, 2, 4, 8, 8)


def vgg(
    norm: Norm | None,
    *,
    in_channels: int = 3,
    classes: int = 10,
    depth: VGGDepth = 11,
    width: int = 64,
    activation: ActivationName = "relu",
    dropout: float = 0.0,
    init: InitName | None = "glorot",
    scale: float = 1.0,
) -> nn.Sequential:
    """Return a VGG net for 32x32 and 28x28: `features`, five stages that each end in a pooling, and a `classifier`.

    One linear layer stands for the three of the original, whose 4096 units are for large images; `depth` counts them
    still. Glorot's initialization is that of Santurkar et al. 2018.
    """
    if depth not in get_args(VGGDepth):
        raise ArgumentError(f"depth must be one of {get_args(VGGDepth)}; got {depth}.")
    finish = Finish(norm, activation)
    head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout) if dropout else nn.Identity())
    head.append(nn.Linear(_WIDTHS[-1] * width, classes))
    model = nn.Sequential(OrderedDict(features=_features(in_channels, depth, width, finish), classifier=head))
    return initialized(model, init, scale)


def _features(inputs: int, depth: int, width: int, finish: Finish) -> nn.Sequential:
    stages = nn.Sequential()
    for count, times in zip(_CONVOLUTIONS[depth], _WIDTHS, strict=True):
        stage = nn.Sequential()
        for _ in range(count):
            stage.append(conv_unit(inputs, times * width, 3, finish))
            inputs = times * width
        stages.append(stage.append(nn.MaxPool2d(2, ceil_mode=True)))  # ceil: 28 pixels become 1 as 32 do
    return stages
