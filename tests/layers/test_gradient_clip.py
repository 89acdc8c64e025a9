"""Adaptive gradient clipping, unit by unit."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import normkit as nk


def clipped(w, g, clip, eps):
    """The paper's rule, one unit at a time."""
    w, g = w.detach().double().numpy(), g.double().numpy().copy()
    units = [()] if w.squeeze().ndim <= 1 else list(range(len(w)))
    for i in units:
        length, allowed = np.sqrt((g[i] ** 2).sum()), clip * max(np.sqrt((w[i] ** 2).sum()), eps)
        if length > allowed:
            g[i] = g[i] * allowed / length
    return torch.from_numpy(np.asarray(g))


SHAPES = [(), (1,), (7,), (5, 6), (5, 1), (1, 6), (6, 3, 4), (6, 3, 2, 2), (4, 1, 1, 1), (4, 2, 2, 2, 2)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clipping_is_the_rule_unit_by_unit(shape, dtype):
    p = nn.Parameter(torch.randn(shape).to(dtype))
    g = torch.randn(shape)
    if shape:  # from far below the bound to far above it
        g = g * torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    g = g.to(dtype)
    p.grad = g.clone()
    kept = p.detach().clone()
    assert nk.adaptive_gradient_clip_(p, clip=0.3) is None
    expected = clipped(p, g, 0.3, 1e-3)
    torch.testing.assert_close(p.grad.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert p.grad.dtype == dtype
    assert torch.equal(p, kept)


def test_units_within_the_bound_are_not_touched_at_all():
    p = nn.Parameter(torch.ones(3, 4))
    p.grad = torch.tensor([[1e-3], [0.0], [5.0]]) * torch.randn(3, 4)
    before = p.grad.clone()
    nk.adaptive_gradient_clip_([p], clip=0.01)
    assert torch.equal(p.grad[:2], before[:2])
    assert p.grad[2].norm().item() == pytest.approx(0.02)


def test_zero_weights_can_move_and_zero_gradients_stay():
    p = nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad, torch.tensor([[0.6e-5, 0.8e-5, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_unit_that_is_not_finite_is_left_to_be_found(bad):
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.tensor([[bad, 4.0, 0.0], [3.0, 4.0, 0.0]])
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad[0], torch.tensor([bad, 4.0, 0.0]), equal_nan=True)
    assert p.grad[1].norm().item() == pytest.approx(0.01 * math.sqrt(3))


def test_half_precision_lengths_do_not_overflow():
    p = nn.Parameter(torch.full((2, 1000), 300.0).half())
    p.grad = torch.full((2, 1000), 300.0).half()
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad, torch.full((2, 1000), 3.0).half())


def test_a_generator_is_used_once_and_parameters_without_gradient_are_passed_over():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0](torch.randn(5, 3)).square().sum().mul(1e3).backward()
    given = list(model.parameters())
    expected = [None if p.grad is None else clipped(p, p.grad, 0.01, 1e-3).float() for p in given]
    nk.adaptive_gradient_clip_(p for p in given)
    for p, e in zip(given, expected, strict=True):
        assert (p.grad is None) == (e is None)
        assert e is None or torch.allclose(p.grad, e, rtol=1e-6)
    nk.adaptive_gradient_clip_([])


def test_clipping_refuses_before_it_changes_anything():
    p, table = nn.Parameter(torch.ones(3)), nn.Embedding(5, 2, sparse=True)
    p.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    for error, words, parameters, options in (
        (ValueError, "clip must be positive.*got 0", p, {"clip": 0}),
        (ValueError, "clip must be positive.*got nan", p, {"clip": math.nan}),
        (ValueError, "eps must be positive.*got -1", p, {"eps": -1}),
        (TypeError, r"dense gradients.*shape \(5, 2\).*sparse_coo.*sparse=False", [p, table.weight], {}),
        (ValueError, r"got a tuple among them.*model.parameters", [p, ("name", p)], {}),
    ):
        with pytest.raises(error, match=words) as caught:
            nk.adaptive_gradient_clip_(parameters, **options)
        assert isinstance(caught.value, nk.NormkitError)
        assert torch.equal(p.grad, torch.ones(3))
