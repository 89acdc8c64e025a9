"""The backward in two halves, of torch's operators: what the reference gives, also by those that only GPUs have."""

import pytest
import torch

from normkit.kernels import fused_halves, select
from normkit.kernels.reference import Recipe
from normkit.kernels.synced import SyncedNormalize

ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]


def doubled(m):
    """What two processes with the same batch would gather."""
    return m._replace(count=2 * m.count)


def step(backend, tensors, dy, activation):
    leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
    recipe = Recipe((0, 2), 1e-5, activation, True, (1, 5, 1))
    with select.backend(backend):
        y, *_ = SyncedNormalize.apply(*leaves, None, recipe, doubled, lambda sums: 2 * sums)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


def tensors(affine, residual, dtype=torch.float64):
    x, r, dy = (torch.randn(8, 5, 4, dtype=torch.float64).to(dtype) for _ in range(3))
    weight, bias = torch.randn(2, 5, dtype=torch.float64).to(dtype) if affine else (None, None)
    return (x, weight, bias, r if residual else None), dy


def check(affine, residual, activation):
    given, dy = tensors(affine, residual)
    found, expected = (step(backend, given, dy, activation) for backend in ("torch", "reference"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_the_reference(activation, affine, residual):
    check(affine, residual, activation)


# The operators of torch's SyncBatchNorm exist on GPUs only; what they compute is written in torch's own sources as:


def backward_reduce(dy, x, mean, invstd, weight, for_input, for_weight, for_bias):
    assert (for_input, for_weight, for_bias) == (True, False, False)
    from_mean = x - mean.view(1, -1, 1)
    return dy.sum((0, 2)), (dy * from_mean).sum((0, 2)), None, None


def backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert count.dtype is torch.int32
    assert count.dim() == 1
    view, n = (1, -1, 1), count.sum()
    through = (x - mean.view(view)) * (invstd.square() * sum_dy_xmu / n).view(view)
    scale = invstd if weight is None else invstd * weight
    return (dy - (sum_dy / n).view(view) - through) * scale.view(view)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_operators_that_gpus_have_are_given_what_they_take(activation, affine, monkeypatch):
    calls = []

    def counting(function):
        return lambda *args: (calls.append(function), function(*args))[1]

    monkeypatch.setattr(fused_halves, "has_operators", lambda x: True)
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", counting(backward_reduce))
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", counting(backward_elemt))
    check(affine, False, activation)
    assert calls == [backward_reduce, backward_elemt]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_kept(dtype):
    given, dy = tensors(True, True, dtype)
    for a, b in zip(*(step(backend, given, dy, "silu") for backend in ("torch", "reference")), strict=True):
        assert a.dtype is b.dtype is dtype
        tolerance = 1e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_the_gradient_behind_an_activation(activation):
    z, dy = torch.randn(2, 50, dtype=torch.float64)
    slope = select.reference.ACTIVATIONS[activation].slope(z)
    torch.testing.assert_close(fused_halves.behind(dy, z, activation), dy * slope)
