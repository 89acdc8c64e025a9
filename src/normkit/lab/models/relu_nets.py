"""Small nets of ReLUs, each ReLU a module of its own, so that a hook can read where its unit switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from normkit.lab.data.types import DataSet
from normkit.lab.models.units import Finish, Norm, unit


def relu_mlp(norm: Norm | None, inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return fully connected units of these widths and a linear output; weights are left to a later `initialize_`."""
    finish = Finish(norm, nn.ReLU)
    units = [unit(nn.Linear(m, n, bias=finish.bias), n, finish) for m, n in pairwise([inputs, *hidden])]
    return nn.Sequential(nn.Flatten(), *units, nn.Linear(hidden[-1], classes))


def relu_conv(norm: Norm | None, channels: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return 3x3 convolutions of stride 2 with these widths, the mean over positions, and a linear output."""
    finish = Finish(norm, nn.ReLU)
    units = [
        unit(nn.Conv2d(m, n, 3, stride=2, padding=1, bias=finish.bias), n, finish)
        for m, n in pairwise([channels, *hidden])
    ]
    return nn.Sequential(*units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden[-1], classes))


def relu_net(settings: Mapping[str, Any], norm: Norm | None, found: DataSet) -> nn.Sequential:
    """Return the net that an arm's settings ask for, "mlp" or "conv" with "hidden" widths, for the images of a set."""
    if settings["net"] == "conv":
        return relu_conv(norm, found.train.pixels.shape[1], settings["hidden"], len(found.classes))
    return relu_mlp(norm, found.train.pixels[0].numel(), settings["hidden"], len(found.classes))
