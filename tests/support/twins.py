"""Layers beside torch's BatchNorm2d in the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.case import randomize_


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def twins(build: Callable[..., nn.Module], *args: Any, **options: Any) -> tuple[nn.Module, nn.BatchNorm2d]:
    """A layer of 4 channels in random state, and a BatchNorm2d in the same."""
    layer = randomize_(build(4, *args, **options)).double()
    bn = nn.BatchNorm2d(4).double()
    bn.load_state_dict(layer.state_dict())
    return layer, bn


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_state(a: nn.Module, b: nn.Module, tolerance: float = 1e-12) -> None:
    for name, t in b.state_dict().items():
        torch.testing.assert_close(a.state_dict()[name], t, rtol=tolerance, atol=tolerance, msg=name)
