"""The unit that every model is made of: a layer with weights, the norm after it and the activation."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from normkit.activations import LEAKY_SLOPE, ActivationName, check_activation
from normkit.errors import ArgumentError
from normkit.layers import EvoNormB0, EvoNormS0, FilterResponseNorm2d
from normkit.layers.norm_layer import NormLayer

Norm = Callable[[int], nn.Module]
"""Makes a norm, given the number of channels: a class, a partial, any function. The norm has no activation."""

ActivationFactory = Callable[[], nn.Module]

_MODULES: dict[str, ActivationFactory] = {
    "relu": nn.ReLU,
    "leaky_relu": partial(nn.LeakyReLU, LEAKY_SLOPE),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
# What goes into the norm. Smooth ones stay modules of their own, where hooks read what enters them.
_FUSED = ("relu", "leaky_relu")


class Finish(NamedTuple):
    """What follows a layer: a norm, or none, and an activation: one of our names, a factory, or none."""

    norm: Norm | None
    activation: ActivationName | ActivationFactory | None = "relu"

    @property
    def bias(self) -> bool:
        """Whether the layer before needs a bias: the norm's beta takes its place."""
        return self.norm is None

    def bare(self) -> Finish:
        """The same norm, without an activation."""
        return self._replace(activation=None)


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution, which in channels_last is a matrix product: for small maps in half the time."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        return linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def unit(layer: nn.Module, channels: int, finish: Finish) -> nn.Sequential:
    """Return `layer`, `norm` and `activation` in a row; what is not wanted, or inside the norm, is not there."""
    return nn.Sequential(OrderedDict([("layer", layer), *_following(channels, finish).items()]))


def conv_unit(inputs: int, outputs: int, kernel: int, finish: Finish, *, stride: int = 1) -> nn.Sequential:
    """Return the unit of a convolution that keeps the size but for its stride."""
    kind = PointwiseConv2d if kernel == stride == 1 else nn.Conv2d
    return unit(kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=finish.bias), outputs, finish)


def norm_unit(channels: int, finish: Finish) -> nn.Sequential:
    """Return `norm` and `activation` without a layer, as pre-activation blocks begin."""
    return nn.Sequential(_following(channels, finish))


class Join(nn.Module):
    """activation(norm(x) + shortcut), all in one where the norm can do it."""

    def __init__(self, channels: int, finish: Finish) -> None:
        super().__init__()
        self.norm = nn.Identity() if finish.norm is None else _checked(finish.norm(channels))
        self.is_fused = _fuse_(self.norm, finish.activation)
        self.activation = nn.Identity() if self.is_fused else make_activation(finish.activation)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Join a residual branch and its shortcut."""
        if self.is_fused:
            return self.norm(x, residual=shortcut)  # type: ignore[no-any-return]
        return self.activation(self.norm(x) + shortcut)  # type: ignore[no-any-return]


def make_activation(activation: str | ActivationFactory | None) -> nn.Module:
    """Return an activation as a module of its own."""
    if activation is None:
        return nn.Identity()
    if not isinstance(activation, str):
        return activation()
    check_activation(activation)
    return _MODULES[activation]()


def _following(channels: int, finish: Finish) -> OrderedDict[str, nn.Module]:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    is_active = finish.activation is None
    if finish.norm is not None:
        norm = parts["norm"] = _checked(finish.norm(channels))
        is_active = is_active or _is_its_own_activation(norm) or _fuse_(norm, finish.activation)
    if not is_active:
        parts["activation"] = make_activation(finish.activation)
    return parts


def _checked(norm: nn.Module) -> nn.Module:
    if isinstance(norm, NormLayer) and norm.activation is not None:
        raise ArgumentError(
            f"norm must make layers without an activation, which the model puts in; got {norm}. Leave it out."
        )
    return norm


def _is_its_own_activation(norm: nn.Module) -> bool:
    return isinstance(norm, EvoNormB0 | EvoNormS0) or (isinstance(norm, FilterResponseNorm2d) and norm.tau is not None)


def _fuse_(norm: nn.Module, activation: str | ActivationFactory | None) -> bool:
    """Put the activation into a norm of ours that can carry it, and say whether it is there."""
    if activation not in _FUSED or not isinstance(norm, NormLayer) or getattr(norm, "inplace", False):
        return False
    if "residual" not in inspect.signature(type(norm).forward).parameters:  # those that take none have no activation
        return False
    norm.activation = str(activation)
    return True
