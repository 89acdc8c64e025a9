"""Inception with and without Batch Normalization (Ioffe & Szegedy 2015, 4.2), for large images and for small ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normkit.activations import ActivationName
from normkit.lab.models.inception_rows import FIGURE_5, Row, rows
from normkit.lab.models.initial import InitName, initialized
from normkit.lab.models.units import Finish, Norm, conv_unit, unit
from normkit.layers import LocalResponseNorm


class InceptionModule(nn.Module):
    """Up to four branches, joined along the channels. With a stride, each branch carries it in its last layer."""

    def __init__(self, inputs: int, row: Row, finish: Finish) -> None:
        super().__init__()
        self.branches = nn.ModuleDict()
        if row.one:
            self.branches["1x1"] = conv_unit(inputs, row.one, 1, finish)
        self.branches["3x3"] = nn.Sequential(
            conv_unit(inputs, row.three_reduce, 1, finish),
            conv_unit(row.three_reduce, row.three, 3, finish, stride=row.stride),
        )
        self.branches["double3x3"] = nn.Sequential(
            conv_unit(inputs, row.double_reduce, 1, finish),
            conv_unit(row.double_reduce, row.double, 3, finish),
            conv_unit(row.double, row.double, 3, finish, stride=row.stride),
        )
        self.branches["pool"] = _pool_branch(inputs, row, finish)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' channels, one after the other."""
        return torch.cat([branch(x) for branch in self.branches.values()], dim=1)


def _pool_branch(inputs: int, row: Row, finish: Finish) -> nn.Sequential:
    pool: nn.Module = nn.MaxPool2d(3, row.stride, padding=1)
    if row.pool == "avg":
        pool = nn.AvgPool2d(3, row.stride, padding=1, count_include_pad=False)
    return nn.Sequential(pool, *([conv_unit(inputs, row.project, 1, finish)] if row.project else []))


class Inception(nn.Module):
    """A `stem`, `blocks` of modules named as in figure 5, and a linear `classifier` over the maps' means."""

    def __init__(
        self, stem: nn.Module, inputs: int, table: Mapping[str, Row], finish: Finish, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential()
        for name, row in table.items():
            self.blocks.add_module(name, InceptionModule(inputs, row, finish))
            inputs = row.outputs(inputs)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.dropout(self.pool(self.blocks(self.stem(x)))))  # type: ignore[no-any-return]


def bn_inception(
    norm: Norm | None,
    *,
    in_channels: int = 3,
    classes: int = 1000,
    activation: ActivationName = "relu",
    dropout: float = 0.0,
    lrn: bool = False,
    init: InitName | None = "he",
    scale: float = 1.0,
) -> Inception:
    """Return the net of figure 5, for 224x224.

    Without a norm it is the paper's Inception; GoogLeNet's own regularizers are `dropout=0.4` and `lrn=True`.
    """
    finish = Finish(norm, activation)
    multiplied = 8 * in_channels
    # Separable: no norm and no activation between its halves, and so no bias.
    depthwise = nn.Conv2d(in_channels, multiplied, 7, stride=2, padding=3, groups=in_channels, bias=False)
    pointwise = nn.Conv2d(multiplied, 64, 1, bias=finish.bias)
    first = unit(nn.Sequential(depthwise, pointwise), 64, finish)
    stem = _stem(first, 64, finish, lrn)
    stem.add_module("pool2", nn.MaxPool2d(3, stride=2, padding=1))
    model = Inception(stem, 192, FIGURE_5, finish, classes, dropout)
    return initialized(model, init, scale)


def small_inception(
    norm: Norm | None,
    *,
    in_channels: int = 1,
    classes: int = 10,
    activation: ActivationName = "relu",
    dropout: float = 0.0,
    lrn: bool = False,
    width: int = 8,
    modules: int = 6,
    stem_stride: int = 2,
    init: InitName | None = "he",
    scale: float = 1.0,
) -> Inception:
    """Return a net of the same build for 28x28 and 32x32, with `width` channels for figure 5's 64.

    A 3x3 convolution stands for the 7x7, and one pooling for two: the modules see maps of 7, 4 and 2 pixels a side (8,
    4 and 2), or twice that with `stem_stride=1`. `width=64, modules=10` has figure 5's modules, one for one.
    """
    finish = Finish(norm, activation)
    stem = _stem(conv_unit(in_channels, width, 3, finish, stride=stem_stride), width, finish, lrn)
    model = Inception(stem, 3 * width, rows(modules, width), finish, classes, dropout)
    return initialized(model, init, scale)


def _stem(first: nn.Module, width: int, finish: Finish, lrn: bool) -> nn.Sequential:
    """The layers before the modules. Local response normalization stands where GoogLeNet had it."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(first=first, pool1=nn.MaxPool2d(3, stride=2, padding=1))
    if lrn:
        parts["lrn1"] = LocalResponseNorm(5)
    parts["reduce"] = conv_unit(width, width, 1, finish)
    parts["second"] = conv_unit(width, 3 * width, 3, finish)
    if lrn:
        parts["lrn2"] = LocalResponseNorm(5)
    return nn.Sequential(parts)
