"""The activations that a layer can carry, with their slopes for the analytic backward."""

from collections.abc import Callable
from math import pi, sqrt
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.errors import ArgumentError, did_you_mean

ActivationName = Literal["relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]

LEAKY_SLOPE = 0.01


class Activation(NamedTuple):
    """A function and its derivative, both of the pre-activation and both differentiable again."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _relu_slope(z: Tensor) -> Tensor:
    # `not z <= 0` rather than `z > 0`: a NaN lets the gradient through, as in torch.
    return (~(z <= 0)).to(z.dtype)


def _leaky_slope(z: Tensor) -> Tensor:
    return torch.ones_like(z).masked_fill(z <= 0, LEAKY_SLOPE)


def _silu_slope(z: Tensor) -> Tensor:
    s = z.sigmoid()
    return s * (1 + z * (1 - s))


def _gelu_slope(z: Tensor) -> Tensor:
    density = (-0.5 * z.square()).exp() / sqrt(2 * pi)
    return 0.5 * (1 + torch.erf(z / sqrt(2))) + z * density


def _sigmoid_slope(z: Tensor) -> Tensor:
    s = z.sigmoid()
    return s * (1 - s)


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 - z.tanh().square()


def _leaky_relu(z: Tensor) -> Tensor:
    return F.leaky_relu(z, LEAKY_SLOPE)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu, _relu_slope),
    "leaky_relu": Activation(_leaky_relu, _leaky_slope),
    "silu": Activation(F.silu, _silu_slope),
    "gelu": Activation(F.gelu, _gelu_slope),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_slope),
    "tanh": Activation(torch.tanh, _tanh_slope),
}


def check_activation(name: str | None) -> None:
    """Refuse a name that is not in the table, with the nearest that is."""
    if name is None or name in ACTIVATIONS:
        return
    known = ", ".join(f'"{known}"' for known in get_args(ActivationName))
    raise ArgumentError(f"activation must be one of {known}, or None; got {name!r}.{did_you_mean(name, ACTIVATIONS)}")
