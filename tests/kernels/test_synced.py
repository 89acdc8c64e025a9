"""A batch in one process alone, whose statistics go through the exchange of a shared one."""

import pytest
import torch

from normkit.kernels import select
from normkit.kernels.reference import Recipe
from normkit.kernels.synced import SyncedNormalize


def step(backend, x, residual, mask, activation):
    leaves = [
        t.detach().requires_grad_()
        for t in (x, torch.linspace(-1, 2, x.shape[1], dtype=x.dtype), x[0, :, 0, 0], residual)
    ]
    recipe = Recipe((0, 2, 3), 1e-5, activation, True, (1, x.shape[1], 1, 1))
    with select.backend(backend):
        y, *_ = SyncedNormalize.apply(*leaves, mask, recipe, lambda m: m, lambda sums: sums)
        dy = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (0, 3, 1, 2)], ids=["plain", "copied", "channels last"])
def test_the_loops_agree_with_the_reference_on_any_strides(order, activation, masked):
    """What lies beside the input must have the layout of its copy, not its own."""
    dtype = torch.float32 if activation == "silu" else torch.float64  # in which no value is at a kink by rounding
    x, residual = (torch.randn(4, 5, 6, 7, dtype=dtype).permute(order) for _ in range(2))
    residual = residual.contiguous()
    mask = torch.rand(x.shape[0], 1, *x.shape[2:]) < 0.8 if masked else None
    for found, expected in zip(*(step(b, x, residual, mask, activation) for b in ("native", "reference")), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
