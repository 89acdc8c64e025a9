"""Two whole networks, built with any norm: what a faster layer is worth in them is what counts."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from normkit.activations import ActivationName
from normkit.layers import BatchNorm2d


class NormFactory(Protocol):
    """Makes a norm with its activation, to be called as norm(x) or norm(x, residual=r)."""

    def __call__(self, channels: int, *, activated: bool = True) -> nn.Module:
        """Return the norm of so many channels; the one on a shortcut has no activation."""


def fused(activation: ActivationName, **options: Any) -> NormFactory:
    """Return the factory of our layer, which takes the residual and the activation itself."""

    def norm(channels: int, *, activated: bool = True) -> nn.Module:
        return BatchNorm2d(channels, activation=activation if activated else None, **options)

    return norm


def separate(activation: nn.Module) -> NormFactory:
    """Return the factory of torch's layer, followed by what ours has inside. State dicts fit both ways."""

    def norm(channels: int, *, activated: bool = True) -> nn.Module:
        return _SeparateBatchNorm2d(channels, activation if activated else nn.Identity())

    return norm


class _SeparateBatchNorm2d(nn.BatchNorm2d):
    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__(channels)
        self.activation = activation

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        y = super().forward(input)
        if residual is not None:
            y += residual  # in place, as torchvision's networks do
        return self.activation(y)  # type: ignore[no-any-return]


def resnet18(norm: NormFactory, classes: int = 1000) -> nn.Module:
    """Return ResNet-18 (He et al. 2015), with its stem for large images."""
    stem = [*_unit(3, 64, 7, norm, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        blocks += [BasicBlock(inputs, outputs, norm, stride=2 if stage else 1), BasicBlock(outputs, outputs, norm)]
        inputs = outputs
    return nn.Sequential(*stem, *blocks, *_head(inputs, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: NormFactory, *, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(*_unit(inputs, outputs, 3, norm, stride=stride))
        self.conv, self.norm = _unit(outputs, outputs, 3, norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_unit(inputs, outputs, 1, norm, stride=stride, activated=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(norm(conv(...)) + shortcut)."""
        return self.norm(self.conv(self.first(x)), residual=self.shortcut(x))  # type: ignore[no-any-return]


class Widths(NamedTuple):
    """Channels of an Inception module: one row of figure 5 of Ioffe & Szegedy 2015."""

    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    pool: int


# Rows 3a, 3b; 4a, 4d (which adds up to its printed 576 with 96 after the pool); 5b.
_INCEPTION_STAGES = (
    (Widths(64, 64, 64, 64, 96, 32), Widths(64, 64, 96, 64, 96, 64)),
    (Widths(224, 64, 96, 96, 128, 128), Widths(96, 128, 192, 160, 192, 96)),
    (Widths(352, 192, 320, 192, 224, 128),),
)


def inception(norm: NormFactory, classes: int = 1000) -> nn.Module:
    """Return a short BN-Inception (Ioffe & Szegedy 2015, figure 5) for small images.

    Half of the modules, pooling in place of those with a stride, and one pooling less before them.
    """
    layers = [*_unit(3, 64, 7, norm, stride=2), *_unit(64, 64, 1, norm), *_unit(64, 192, 3, norm)]
    inputs = 192
    for stage in _INCEPTION_STAGES:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        for widths in stage:
            layers.append(InceptionModule(inputs, widths, norm))
            inputs = widths.one + widths.three + widths.double + widths.pool
    return nn.Sequential(*layers, *_head(inputs, classes))


class InceptionModule(nn.Module):
    """Four branches, joined along the channels."""

    def __init__(self, inputs: int, widths: Widths, norm: NormFactory) -> None:
        super().__init__()
        one = _unit(inputs, widths.one, 1, norm)
        three = [*_unit(inputs, widths.three_reduce, 1, norm), *_unit(widths.three_reduce, widths.three, 3, norm)]
        double = [*_unit(inputs, widths.double_reduce, 1, norm), *_unit(widths.double_reduce, widths.double, 3, norm)]
        double += _unit(widths.double, widths.double, 3, norm)
        pool = [nn.AvgPool2d(3, stride=1, padding=1), *_unit(inputs, widths.pool, 1, norm)]
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in (one, three, double, pool))

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' channels, one after the other."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _unit(
    inputs: int, outputs: int, kernel: int, norm: NormFactory, *, stride: int = 1, activated: bool = True
) -> list[nn.Module]:
    """A convolution that keeps the size but for its stride, and the norm after it."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, norm(outputs, activated=activated)]


def _head(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
