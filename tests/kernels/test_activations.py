"""The smooth activations of the loops, alone: a BatchNorm in evaluation that would change nothing without them."""

import pytest
import torch
from torch.nn import functional as F

import normkit as nk
from normkit.kernels import select
from support.instruction_sets import runnable, using

SMOOTH = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def value_and_slope(function, z):
    z = z.clone().requires_grad_()
    y = function(z)
    y.backward(torch.ones_like(y))
    return y.detach(), z.grad


@pytest.fixture(params=runnable())
def loops(request):
    """Each activation as the loops of an instruction set compute it, of (1, 1, n) values."""
    with using(request.param), select.backend("native"):
        yield lambda name: nk.BatchNorm1d(1, eps=1e-30, affine=False, activation=name).eval()


@pytest.mark.parametrize("name", SMOOTH)
def test_a_few_units_in_the_last_place_of_the_largest(loops, name):
    z = (torch.rand(1, 1, 100_001) - 0.5) * torch.tensor([1e-3, 1.0, 4.0, 16.0, 200.0]).view(5, 1, 1)
    for some in z:
        exact = value_and_slope(SMOOTH[name], some.double()[None])
        for found, expected in zip(value_and_slope(loops(name), some[None]), exact, strict=True):
            unit = torch.finfo(torch.float32).eps * max(expected.abs().max().item(), some.abs().max().item() / 2)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * unit)


@pytest.mark.parametrize("name", SMOOTH)
def test_far_from_zero(loops, name):
    """Nothing overflows: what is zero or one in float64 is so to a float's smallest numbers, or to its last place."""
    z = torch.tensor([90.0, -90.0, 3e4, -3e4, 1e20, -1e20, 3e38, -3e38]).view(1, 1, -1)
    exact = value_and_slope(SMOOTH[name], z.double())
    for found, expected in zip(value_and_slope(loops(name), z), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-34)


@pytest.mark.parametrize("name", SMOOTH)
def test_infinities_give_what_they_give_in_torch(loops, name):
    """In float64: of a float32 infinity torch's GELU for AVX-512 makes a NaN, and that for AVX2 an infinity."""
    z = torch.tensor([float("inf"), -float("inf"), *torch.randn(9)]).view(1, 1, -1)
    exact = value_and_slope(SMOOTH[name], z.double())
    for found, expected in zip(value_and_slope(loops(name), z), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_any_nan_stays_one(loops, name, bits):
    z = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    y, slope = value_and_slope(loops(name), torch.cat([z, torch.ones(9)]).view(1, 1, -1))
    assert y.isnan().flatten().tolist() == slope.isnan().flatten().tolist() == [True] + [False] * 9
