"""Residual nets without normalization: Fixup (Zhang et al. 2019) and SkipInit (De & Smith 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from normkit import checks
from normkit.errors import ArgumentError
from normkit.kernels import select
from normkit.kernels.reference import working_dtype
from normkit.layers.norm_layer import NormLayer, _as_leaf
from normkit.layers.refusals import Unscriptable
from normkit.layers.scaled_std_conv import ScaledStdConv2d

_Weighted = nn.Linear | _ConvNd

_NORMS = (
    NormLayer,
    ScaledStdConv2d,
    _NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)


class SkipInit(Unscriptable):
    """One learnable number at the end of a residual branch, zero at first: y = alpha * branch.

    x + SkipInit()(branch(x)) starts as the identity. Set alpha to one and it is Fixup's multiplier.

    Args:
        device: where alpha lives.
        dtype: its type.
    """

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        # One dimension, not none: FSDP cannot shard a parameter without any.
        self.alpha = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set alpha to zero."""
        nn.init.zeros_(self.alpha)

    def forward(self, input: Tensor) -> Tensor:
        """Scale the branch, in its own type."""
        if isinstance(input, fx.Proxy):
            return cast(Tensor, _as_leaf(self, input))
        select.leave_to_reference(type(self).__name__)
        checks.floating(input, type(self).__name__)
        wide = working_dtype(input)
        return (input.to(wide) * self.alpha.to(wide)).to(input.dtype)


@torch.no_grad()
def fixup_init_(branches: Iterable[nn.Module], *, classifier: nn.Module | None = None) -> None:
    """Initialize a residual net so that it trains without normalization.

    In each of the L branches the last linear layer or convolution starts at zero; the others are drawn from a normal
    distribution of standard deviation sqrt(2 / fan_out) * L ** (-1 / (2 * m - 2)), where m is how many the branch has.
    Biases and the classifier start at zero. Layers count in the order in which the branch holds them.

    Args:
        branches: the residual branches, all of the net's.
        classifier: the last layer of the net.
    """
    layers = _branch_layers(branches)
    last = None if classifier is None else _checked_classifier(classifier)
    for inner in layers:
        for layer in inner[:-1]:
            _fill_(layer, len(layers) ** (-1 / (2 * len(inner) - 2)))
        _fill_(inner[-1], 0.0)
    if last is not None:
        _fill_(last, 0.0)


def _branch_layers(branches: Iterable[nn.Module]) -> list[list[_Weighted]]:
    """The linear layers and convolutions of every branch, after all checks."""
    if isinstance(branches, nn.Module) and not isinstance(branches, nn.ModuleList):
        raise ArgumentError(
            f"fixup_init_ needs a list of branches; got one {type(branches).__name__}. A single branch? [branch]."
        )
    found, seen = [], set[_Weighted]()
    for i, branch in enumerate(branches):
        if not isinstance(branch, nn.Module):
            raise ArgumentError(f"fixup_init_ needs modules as branches; branch {i} is a {type(branch).__name__}.")
        layers = _layers_within(branch, i)
        if seen & set(layers):
            raise ArgumentError(
                f"fixup_init_ needs branches that share no layer; branch {i} has one of an earlier branch. "
                "Pass each branch once, without the block or stage around it."
            )
        seen |= set(layers)
        found.append(layers)
    if not found:
        raise ArgumentError("fixup_init_ needs at least one residual branch; got none.")
    return found


def _layers_within(branch: nn.Module, i: int) -> list[_Weighted]:
    layers = []
    for name, module in branch.named_modules():
        where = f"branch {i}, {name or 'itself'}: {type(module).__name__}"
        if isinstance(module, _NORMS) or hasattr(module, "running_mean"):
            raise ArgumentError(f"fixup_init_ takes the place of normalization; found {where}. Remove it first.")
        if isinstance(module, _Weighted):
            _check_layer(module, where)
            layers.append(module)
    if not layers:
        raise ArgumentError(
            f"fixup_init_ needs a linear layer or convolution in every branch; branch {i}, a {type(branch).__name__}, "
            "has none. Leave it out."
        )
    return layers


def _checked_classifier(classifier: nn.Module) -> _Weighted:
    if not isinstance(classifier, _Weighted):
        raise ArgumentError(
            f"fixup_init_ needs a linear layer or convolution as classifier; got {type(classifier).__name__}. "
            "Pass the last layer itself."
        )
    _check_layer(classifier, "the classifier")
    return classifier


def _check_layer(layer: _Weighted, where: str) -> None:
    if parametrize.is_parametrized(layer):
        raise ArgumentError(f"fixup_init_ needs plain weights; those of {where} are parametrized. Initialize first.")
    if is_lazy(layer.weight):
        raise ArgumentError(f"fixup_init_ needs weights that have a shape; {where} is lazy. Run a batch first.")


def _fill_(layer: _Weighted, factor: float) -> None:
    """He's initialization by fan-out, times the factor: what one input value feeds into, as in the authors' code."""
    if isinstance(layer, nn.Linear):
        fan_out = layer.out_features
    else:
        fan_out = layer.out_channels // layer.groups * prod(layer.kernel_size)
    if factor:
        nn.init.normal_(layer.weight, 0.0, factor * (2 / fan_out) ** 0.5)
    else:
        nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
