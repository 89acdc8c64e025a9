"""DynamicTanh and Derf: the authors' code, written out again, their spelling, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.kernels import select
from support.case import randomize_
from support.refusal import refused, refused_untouched


class Authors(nn.Module):
    """The papers' formula, with the names that the authors' modules give their parameters."""

    def __init__(self, function, shape, channels_last):
        super().__init__()
        self.function, self.channels_last = function, channels_last
        self.alpha, self.weight, self.bias = (nn.Parameter(torch.empty(s)) for s in (1, shape, shape))
        if function is torch.erf:
            self.shift = nn.Parameter(torch.empty(1))

    def forward(self, x):
        z = self.function(self.alpha * x + (self.shift if self.function is torch.erf else 0))
        if self.channels_last:
            return self.weight * z + self.bias
        return self.weight[:, None, None] * z + self.bias[:, None, None]


KINDS = {"tanh": (nk.DynamicTanh, torch.tanh), "erf": (nk.Derf, torch.erf)}
INPUTS = {
    "tokens": (7, True, (3, 4, 7)),
    "rows": (7, True, (5, 7)),
    "vector": (7, True, (7,)),
    "examples": ((4, 6), True, (5, 4, 6)),
    "maps": (5, False, (3, 5, 4, 6)),
}


def pair(kind, which, dtype=torch.float64, **options):
    (cls, function), (size, last, shape) = KINDS[kind], INPUTS[which]
    ours = randomize_(cls(size, last, **options).to(dtype))
    theirs = Authors(function, size, last).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, torch.randn(shape, dtype=dtype) * 2


@pytest.mark.parametrize("activation", [None, "relu", "mish"])
@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_authors_formula(kind, which, activation):
    ours, theirs, x = pair(kind, which, activation=activation)
    r = torch.randn_like(x).requires_grad_()
    x.requires_grad_()
    y, z = ours(x, residual=r), theirs(x) + r
    z = z if activation is None else getattr(F, activation)(z)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(z)
    found = torch.autograd.grad(y, [x, r, *ours.parameters()], dy)
    expected = torch.autograd.grad(z, [x, r, *theirs.parameters()], dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_by_the_loops_and_by_operators(kind, which):
    ours, theirs, x = pair(kind, which, torch.float32)
    exact, dy = theirs.double(), torch.randn_like(x)
    wide = x.double().requires_grad_()
    expected = torch.autograd.grad(exact(wide), [wide, *exact.parameters()], dy.double())
    for backend in ("auto", "torch"):
        leaf = x.clone().requires_grad_()
        with select.backend(backend):
            y = ours(leaf)
            found = torch.autograd.grad(y, [leaf, *ours.parameters()], dy)
        # A few roundings of terms that are at most as large as gamma, beta and the sums over all values.
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(y.double(), exact(wide), rtol=16 * eps, atol=16 * eps * 4)
        for a, b in zip(found, expected, strict=True):
            size = max(b.abs().max().item(), dy.abs().sum().item() if a.numel() < x.numel() else 1.0)
            torch.testing.assert_close(a.double(), b, rtol=0, atol=64 * eps * max(size, 1.0))


def test_the_loops_run_where_they_can():
    layer, x = nk.DynamicTanh(16), torch.randn(4, 16)
    with select.backend("native"):
        torch.testing.assert_close(layer(x), (0.5 * x).tanh(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer(x.t().contiguous().t()), (0.5 * x).tanh(), rtol=1e-6, atol=1e-6)
        refused(lambda: nk.Derf(16)(x), "none for the error function", error=nk.BackendError)
        refused(lambda: layer.double()(x.double()), "float64", error=nk.BackendError)


@pytest.mark.parametrize("cls", [nk.DynamicTanh, nk.Derf])
def test_how_it_starts(cls):
    layer = cls(5, alpha_init_value=0.8)
    assert [layer.alpha.item(), *layer.weight.tolist(), *layer.bias.tolist()] == pytest.approx(
        [0.8, *[1] * 5, *[0] * 5]
    )
    assert cls(5).alpha.item() == 0.5
    assert cls(5).channels_last
    assert nk.Derf(5).shift.item() == 0.0
    assert nk.Derf(5, True, 0.5, 0.3).shift.item() == pytest.approx(0.3)


def test_no_example_sees_another_and_no_value_either():
    layer, x = randomize_(nk.DynamicTanh(6)), torch.randn(4, 6)
    changed = x.clone()
    changed[2, 3] += 1
    assert torch.equal((layer(x) != layer(changed)).nonzero(), torch.tensor([[2, 3]]))


def test_maps_keep_their_layout():
    layer = randomize_(nk.DynamicTanh(6, channels_last=False))
    x = torch.randn(3, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
    rows = randomize_(nk.DynamicTanh(6))
    turned = torch.randn(6, 4).t()
    torch.testing.assert_close(rows(turned), rows(turned.contiguous()))


@pytest.mark.parametrize("cls", [nk.DynamicTanh, nk.Derf])
def test_bad_input(cls):
    name = cls.__name__
    refused(lambda: cls((4, 5), False), "one gamma per channel", "(4, 5)")
    refused(lambda: cls(4, alpha_init_value=float("nan")), "alpha_init_value must be a finite number; got nan")
    refused(lambda: cls([]), "normalized_shape")
    layer = randomize_(cls(4))
    refused_untouched(layer, lambda: layer(torch.randn(2, 5)), f"{name}(4) needs (..., 4); got (2, 5)")
    refused_untouched(layer, lambda: layer(torch.ones(2, 4).long()), "floating point")
    refused_untouched(layer, lambda: layer(torch.randn(2, 4), residual=torch.randn(1, 4)), "residual")
    maps = randomize_(cls(4, False))
    refused_untouched(maps, lambda: maps(torch.randn(2, 3, 4, 4)), f"{name}(4) needs (N, 4, H, W)")
    refused(lambda: nk.Derf(4, shift_init_value=float("inf")), "shift_init_value must be a finite number; got inf")


def test_what_is_printed():
    assert repr(nk.DynamicTanh(4)) == "DynamicTanh(4, channels_last=True, alpha_init_value=0.5)"
    assert repr(nk.Derf((3, 4), activation="relu")) == (
        "Derf((3, 4), channels_last=True, alpha_init_value=0.5, shift_init_value=0.0, activation=relu)"
    )
