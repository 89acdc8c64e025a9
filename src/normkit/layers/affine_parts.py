"""Gamma and beta, and which of them a layer has."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from normkit.errors import ArgumentError

Affine = bool | Literal["scale", "shift"]


def check_affine(affine: Affine, bias: bool = True) -> tuple[bool, bool]:
    """Return whether there is a gamma, and whether there is a beta."""
    if affine not in (True, False, "scale", "shift"):
        raise ArgumentError(f'affine must be True, False, "scale" or "shift"; got {affine!r}.')
    if affine == "shift" and not bias:
        raise ArgumentError('affine="shift" is a bias alone; got bias=False with it. Use affine=False for neither.')
    return affine in (True, "scale"), affine in (True, "shift") and bias


def keep_parts_(layer: nn.Module, affine: Affine, has_weight: bool, has_bias: bool) -> None:
    """Of gamma and beta, which torch makes together, keep those that were asked for."""
    layer.affine = affine  # type: ignore[assignment]
    if not has_weight:
        layer.register_parameter("weight", None)
    if not has_bias:
        layer.register_parameter("bias", None)


def reset_parts_(layer: nn.Module) -> None:
    """Set gamma to one and beta to zero, where they are."""
    if isinstance(layer.weight, Tensor):
        nn.init.ones_(layer.weight)
    if isinstance(layer.bias, Tensor):
        nn.init.zeros_(layer.bias)
