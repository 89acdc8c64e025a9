"""Adaptive gradient clipping (Brock et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from normkit.errors import ArgumentError, DtypeError
from normkit.kernels.reference import working_dtype


@torch.no_grad()
def adaptive_gradient_clip_(parameters: Tensor | Iterable[Tensor], clip: float = 0.01, eps: float = 1e-3) -> None:
    """Shorten every unit's gradient that is long against its weights: ||G_i|| <= clip * max(||W_i||, eps).

    A unit is one index of the first dimension, an output channel of a linear layer or convolution; a scalar or vector
    (also one written with dimensions of size 1) is one unit. A unit whose gradient holds NaN or infinity is left as it
    is, so that other code that looks for them still finds them; it does not affect other units.

    Args:
        parameters: one, or an iterable of them; those without a gradient are passed over.
        clip: the largest allowed ratio of a unit's gradient to its weights.
        eps: the least length of the weights, so that units that start at zero can move.
    """
    if not clip > 0:
        raise ArgumentError(f"clip must be positive, it is the allowed ratio of lengths; got {clip}. Usual: 0.01.")
    if not eps > 0:
        raise ArgumentError(f"eps must be positive, or units of zero weight never move; got {eps}. Usual: 1e-3.")
    for weight, grad in _with_gradients(parameters):
        limit = _unit_norms(weight).clamp(min=eps) * clip
        length = _unit_norms(grad)
        long = (length > limit) & length.isfinite()
        grad.mul_(torch.where(long, limit / length, 1.0))


def _with_gradients(parameters: Tensor | Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of weight and gradient; all are checked before any is changed."""
    found = []
    for p in [parameters] if isinstance(parameters, Tensor) else parameters:
        if not isinstance(p, Tensor):
            raise ArgumentError(
                f"adaptive_gradient_clip_ needs parameters; got a {type(p).__name__} among them. "
                "Pass model.parameters()."
            )
        if p.grad is None:
            continue
        if p.grad.layout != torch.strided:
            raise DtypeError(
                f"adaptive_gradient_clip_ needs dense gradients; that of a parameter of shape {tuple(p.shape)} is "
                f"{p.grad.layout}. Leave it out, or build its layer with sparse=False."
            )
        if not p.grad.is_floating_point():
            raise DtypeError(
                f"adaptive_gradient_clip_ needs real gradients; that of a parameter of shape {tuple(p.shape)} is "
                f"{p.grad.dtype}. Leave it out."
            )
        found.append((p, p.grad))
    return found


def _unit_norms(t: Tensor) -> Tensor:
    """Lengths that broadcast against t: (units, 1, ...), or (1, ..., 1) for a scalar or vector."""
    vector = sum(n > 1 for n in t.shape) <= 1
    over = tuple(range(0 if vector else 1, t.dim()))
    return cast(Tensor, torch.linalg.vector_norm(t, 2, over or None, keepdim=True, dtype=working_dtype(t)))
