"""Bounded functions of single values, by torch's operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Function = Literal["tanh", "erf"]


def by_operators(x: Tensor, function: Function, alpha: Tensor, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return function(alpha * x + shift), computed and returned in this type."""
    x, alpha = x.to(dtype), alpha.to(dtype)
    z = x * alpha if shift is None else torch.addcmul(shift.to(dtype), x, alpha)
    return z.tanh() if function == "tanh" else z.erf()
