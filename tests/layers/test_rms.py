"""RMSNorm and ScaleNorm: torch's eps, and what ties them together."""

import pytest
import torch
from torch.nn import functional as F

import normkit as nk
from support.cases import randomize_

DOUBLE = torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norms_own_eps_is_torchs(dtype):
    x = torch.tensor([[3e-4, -2e-4, 1e-4, 5e-4]], dtype=dtype)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(nk.RMSNorm(4, dtype=dtype)(x), F.rms_norm(x, (4,)), **tolerance)
    torch.testing.assert_close(nk.functional.rms_norm(x, 4), F.rms_norm(x, (4,)), **tolerance)
    assert nk.RMSNorm(4).eps is None


def test_scale_norm_takes_a_residual():
    layer = randomize_(nk.ScaleNorm(6, activation="tanh", dtype=DOUBLE))
    x, r = torch.randn(3, 6, dtype=DOUBLE), torch.randn(3, 6, dtype=DOUBLE)
    expected = (layer.weight * F.normalize(x, dim=-1) + r).tanh()
    torch.testing.assert_close(layer(x, residual=r), expected, rtol=1e-4, atol=1e-4)  # but for eps


def test_a_new_scale_norm_is_an_rms_norm():
    x = torch.randn(4, 7, dtype=DOUBLE)
    layer = nk.ScaleNorm(7, dtype=DOUBLE)
    assert layer.weight.item() == 7**0.5
    torch.testing.assert_close(layer(x), nk.functional.rms_norm(x, 7, eps=1e-5), rtol=1e-14, atol=1e-14)
