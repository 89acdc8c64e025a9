"""Which backend a call would run on."""

from __future__ import annotations

import copy

from torch import Tensor, nn

import normkit as nk
from normkit.kernels import select


def refuses_loops(layer: nn.Module, x: Tensor) -> bool:
    """Whether the C++ loops cannot run a layer on this input, forward; the layer is left as it was."""
    try:
        with select.backend("native"):
            copy.deepcopy(layer)(x.detach().requires_grad_(x.requires_grad))
    except nk.BackendError:
        return True
    return False
