"""Two whole networks of the lab's, with any norm: what a faster layer is worth in them is what counts."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from normkit.activations import ActivationName
from normkit.lab import models
from normkit.lab.models.inception import InceptionModule
from normkit.lab.models.inception_rows import FIGURE_5
from normkit.lab.models.units import Finish, conv_unit
from normkit.layers import BatchNorm2d

_INCEPTION_STAGES = (("3a", "3b"), ("4a", "4d"), ("5b",))  # rows of figure 5


class NormFactory(Protocol):
    """Makes a norm with its activation, to be called as norm(x) or norm(x, residual=r)."""

    def __call__(self, channels: int, *, activated: bool = True) -> nn.Module:
        """Return the norm of n channels; the one on a shortcut has no activation."""


def fused(activation: ActivationName, **options: Any) -> NormFactory:
    """Return the factory of our layer, which takes the residual and the activation itself."""

    def norm(channels: int, *, activated: bool = True) -> nn.Module:
        return BatchNorm2d(channels, activation=activation if activated else None, **options)

    return norm


def separate(activation: nn.Module) -> NormFactory:
    """Return the factory of torch's layer, followed by the addition and the activation that ours includes."""

    def norm(channels: int, *, activated: bool = True) -> nn.Module:
        return _SeparateBatchNorm2d(channels, activation if activated else nn.Identity())

    return norm


class _SeparateBatchNorm2d(nn.BatchNorm2d):
    """Has the state_dict keys of ours."""

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
    return _with_norms(models.resnet18(BatchNorm2d, classes=classes, init=None), norm)


def inception(norm: NormFactory, classes: int = 1000) -> nn.Module:
    """Return a short BN-Inception (Ioffe & Szegedy 2015, figure 5) for small images.

    Half of the modules, pooling in place of those with a stride, and one pooling less before them.
    """
    finish = Finish(BatchNorm2d)
    net = nn.Sequential(conv_unit(3, 64, 7, finish, stride=2), conv_unit(64, 64, 1, finish))
    net.append(conv_unit(64, 192, 3, finish))
    inputs = 192
    for stage in _INCEPTION_STAGES:
        net.append(nn.MaxPool2d(3, stride=2, padding=1))
        for row in map(FIGURE_5.__getitem__, stage):
            net.append(InceptionModule(inputs, row, finish))
            inputs = row.outputs(inputs)
    net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)])
    return _with_norms(net, norm)


def _with_norms(model: nn.Module, norm: NormFactory) -> nn.Module:
    """Put a contestant's norms in the place of ours, which carry the activations."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, BatchNorm2d):
            model.set_submodule(name, norm(layer.num_features, activated=layer.activation is not None))
    return model
