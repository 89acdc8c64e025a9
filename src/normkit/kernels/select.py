"""The only place that chooses how something is computed, and that says why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from normkit.affine import scale_shift
from normkit.errors import ArgumentError, BackendError
from normkit.kernels import native, reference
from normkit.kernels.context import is_exporting
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

Backend = Literal["auto", "native", "reference"]

_requested: Backend = "auto"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Ask for a backend inside the block: "auto" takes the C++ loops where they fit; the others run or raise."""
    global _requested
    if name not in get_args(Backend):
        raise ArgumentError(f"backend must be one of {get_args(Backend)}; got {name!r}.")
    before, _requested = _requested, name
    try:
        yield
    finally:
        _requested = before


def status() -> dict[str, str]:
    """Return which kernels are in use, and why not the C++ loops if they are not."""
    if native.WHY_NOT is not None:
        return {"backend": "reference", "why": native.WHY_NOT}
    return {"backend": "native", "instruction set": native.instruction_set()}


def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None) -> Moments:
    """Return the moments of x over the dimensions `over`, which keep them."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if not differentiated and _takes_native(x, Recipe(over, 0.0), None, mask):
        return native.moments(x, over)
    return reference.moments(x, over, mask)


def normalize(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalise x with its own moments over the dimensions `recipe.over`; the moments come back detached."""
    if _takes_native(x, recipe, residual, mask):
        return native.normalize(x, recipe, weight, bias, residual)
    if mask is not None:
        # Padding may hold anything; but no gradient of zero removes a NaN from a sum.
        x = torch.where(mask | x.isfinite(), x, 0)
    if torch.compiler.is_compiling() or is_exporting():
        # The compiler derives and fuses the backward itself, from operators that it can see through; so must exporters.
        y, m = reference.normalize(x, weight, bias, residual, mask, recipe)
        return y, m._replace(mean=m.mean.detach(), var=m.var.detach())
    y, mean, var = reference.Normalize.apply(x, weight, bias, residual, mask, recipe)
    return y, Moments(mean, var, reference.count_values(x, recipe.over, mask))


def normalize_stored(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Normalise x with statistics that are already known; they and the parameters keep the dimensions `recipe.over`."""
    tensors = (x, stored.mean, stored.var, weight, bias, residual)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not differentiated and _takes_native(x, recipe, residual, None):
        return native.normalize_stored(x, recipe, stored, weight, bias, residual)
    wide = reference.working_dtype(x)
    stored = stored._replace(mean=stored.mean.to(wide), var=stored.var.to(wide))
    scale, shift = scale_shift(stored, weight, bias, recipe.eps)
    return reference.transform(x, scale, shift, residual, recipe.activation)


def update_natively_(stored: Moments, batch: Moments, momentum: float | Tensor) -> bool:
    """Move stored statistics in place by the C++ core, if it can; return whether it did."""
    if _requested == "reference" or not native.can_update(stored, batch, momentum):
        return False
    native.update_(stored, batch, float(momentum))
    return True


def _takes_native(x: Tensor, recipe: Recipe, residual: Tensor | None, mask: Tensor | None) -> bool:
    if _requested == "reference":
        return False
    reason = native.refuses(x, recipe, residual, mask)
    if reason is not None and _requested == "native":
        raise BackendError(f'The C++ loops were asked for and cannot run: {reason}. Ask for backend "auto".')
    return reason is None
