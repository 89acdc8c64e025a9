"""The activations that a layer can carry: those that the loops fuse, with their slopes, and others, which run after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite, pi, sqrt
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from normkit.errors import ArgumentError, did_you_mean

ActivationName = Literal["relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]
"""Those that the loops compute along with the norm."""

ActivationLike = str | nn.Module | Callable[[Tensor], Tensor]
"""What `activation=` takes: a name, a module or a function."""

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

# Names of others, and of the fused ones too: torch's module of each.
MODULES: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
}

_AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def check_activation(name: str | None) -> None:
    """Refuse a name that is not one of those that the loops fuse, with the nearest that is."""
    if name is None or name in ACTIVATIONS:
        return
    known = ", ".join(f'"{known}"' for known in get_args(ActivationName))
    raise ArgumentError(f"activation must be one of {known}, or None; got {name!r}.{did_you_mean(name, ACTIVATIONS)}")


def check_any(activation: object) -> None:
    """Refuse what is neither a known name nor a module nor a function."""
    if isinstance(activation, str):
        if activation not in MODULES:
            known = ", ".join(f'"{name}"' for name in MODULES)
            raise ArgumentError(
                f"activation must be one of {known}, a module, a function or None; "
                f"got {activation!r}.{did_you_mean(activation, MODULES)}"
            )
    elif isinstance(activation, type):
        raise ArgumentError(
            f"activation must be a name, a module or a function; got the class {activation.__name__}. "
            f"Make one: activation={activation.__name__}()."
        )
    elif activation is not None and not callable(activation):
        raise ArgumentError(f"activation must be a name, a module or a function; got {activation!r}.")


class Parted(NamedTuple):
    """An activation, parted into what the kernels fuse and what runs after them; at most one of the two is there."""

    fused: str | None
    after: Callable[[Tensor], Tensor] | None

    def finish(self, y: Tensor) -> Tensor:
        """Apply what runs after the kernels, if anything does."""
        return y if self.after is None else self.after(y)

    def apply(self, z: Tensor) -> Tensor:
        """Apply all of it, to what no kernel has finished."""
        return self.finish(z if self.fused is None else ACTIVATIONS[self.fused].function(z))


def parted(activation: ActivationLike | None, negative_slope: float = LEAKY_SLOPE) -> Parted:
    """Check an activation, and say which part of it the kernels compute."""
    check_any(activation)
    if negative_slope != LEAKY_SLOPE:
        return Parted(None, partial(F.leaky_relu, negative_slope=_checked_slope(activation, negative_slope)))
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return Parted(activation, None)
    return Parted(None, _AFTERWARDS[activation] if isinstance(activation, str) else activation)


def _checked_slope(activation: ActivationLike | None, negative_slope: float) -> float:
    if not isinstance(negative_slope, (float, int)) or not isfinite(negative_slope):
        raise ArgumentError(f"negative_slope must be a finite number; got {negative_slope!r}.")
    if activation != "leaky_relu":
        raise ArgumentError(
            f'negative_slope is that of activation="leaky_relu"; got {negative_slope} with '
            f"{label(activation) or 'no activation'}. Leave it out."
        )
    return float(negative_slope)


def label(activation: ActivationLike | None) -> str | None:
    """An activation in a word: its name, the class of a module, the name of a function."""
    if activation is None or isinstance(activation, str):
        return activation
    if isinstance(activation, nn.Module):
        return name_of(activation) or type(activation).__name__
    return getattr(activation, "__name__", None) or type(activation).__name__


# ---- activations as modules


# By what torch prints, so that another approximation counts as another activation.
_PRINTED = {
    repr(make(**options)): name
    for name, make in MODULES.items()
    for options in ({}, {"inplace": True})
    if not options or name in ("relu", "leaky_relu", "silu", "relu6", "hardswish", "mish", "elu")
}


def name_of(module: nn.Module) -> str | None:
    """Our name of one of torch's modules; None if it has none. The slope of a leaky ReLU is not part of the name."""
    if not type(module).__module__.startswith("torch.nn."):
        return None
    return "leaky_relu" if type(module) is nn.LeakyReLU else _PRINTED.get(repr(module))


class FunctionActivation(nn.Module):
    """A function as a module, for places where only modules can be."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(input)

    def extra_repr(self) -> str:
        """The function's name."""
        return str(label(self.function))


def as_module(activation: ActivationLike) -> nn.Module:
    """An activation as a module: torch's for a name, the module itself, or a function in a module of ours."""
    if isinstance(activation, nn.Module):
        return activation
    if not isinstance(activation, str):
        return FunctionActivation(activation)
    return MODULES[activation]()


# ---- the activation inside of a norm


def activation_options(norm: nn.Module) -> dict[str, Any]:
    """The options of a layer of ours that does what a norm, ours or another library's, does after normalizing.

    `activation`, and `negative_slope` where it is not the usual one; empty if nothing follows. A module that has no
    name here is passed on itself, with its parameters.
    """
    kept = _kept_in(norm)
    if isinstance(kept, nn.Module):
        name = name_of(kept)
        return {"activation": kept} if name is None else _named(name, getattr(kept, "negative_slope", LEAKY_SLOPE))
    if not isinstance(kept, str):
        return {} if kept is None else {"activation": kept}
    theirs = vars(norm).get("activation_param")  # inplace_abn: the slope, or the alpha of its ELU
    if kept == "elu" and theirs is not None:
        return {"activation": nn.ELU(theirs)}
    return _named(kept, getattr(norm, "negative_slope", LEAKY_SLOPE) if theirs is None else theirs)


def activation_of(norm: nn.Module) -> ActivationLike | None:
    """What to pass as `activation=` to a layer that is to do what this norm does after normalizing; None if nothing.

    As `activation_options`, in a single value: a leaky ReLU with a slope of its own is a module.
    """
    options = activation_options(norm)
    if "negative_slope" in options:
        return nn.LeakyReLU(options["negative_slope"])
    return options.get("activation")


def _named(name: str, slope: float) -> dict[str, Any]:
    has_slope = name == "leaky_relu" and slope != LEAKY_SLOPE
    return {"activation": name} | ({"negative_slope": slope} if has_slope else {})


def _kept_in(norm: nn.Module) -> ActivationLike | None:
    """The activation that a norm keeps: as an attribute of that name (ours, inplace_abn), or as a child (timm)."""
    kept = vars(norm).get("activation")
    if kept in MODULES if isinstance(kept, str) else callable(kept) and not isinstance(kept, type):
        return kept
    return activation_child(norm)


def activation_child(norm: nn.Module) -> nn.Module | None:
    """The child of a norm that is an activation, as timm's norms have it."""
    no_activation = nn.Identity | _DropoutNd | nn.ModuleList  # a list: the auxiliary norms of a split one
    for name, child in norm._modules.items():
        if name != "parametrizations" and child is not None and not isinstance(child, no_activation):
            return child
    return None
