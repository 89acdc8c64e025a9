"""The bound itself: the truth it compares with is autograd's, what keeps it passes, and what does not fails."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit.activations import ACTIVATIONS
from support.bounds import UNITS, Bound, Step, bound_of_any, bounds_of, ulp

CHANNELS = (1, 5, 1, 1)


def a_step(dtype=torch.float32, activation=None, mask=False, stored=False, mean=0.3):
    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    x = (torch.randn(6, 5, 7, 8, dtype=torch.float64) * 1.3 + mean).to(dtype)
    return Step(
        x,
        (0, 2, 3),
        1e-5,
        randn(CHANNELS),
        randn(CHANNELS),
        residual=randn(x.shape),
        mask=torch.rand(6, 1, 7, 8) < 0.7 if mask else None,
        activation=activation,
        stored=(randn(CHANNELS), randn(CHANNELS).abs() + 0.5) if stored else None,
        dy=randn(x.shape),
        running=None if stored else (randn(5), randn(5).abs() + 0.5),
    )


def by_autograd(step):
    """Every result of a step, from the formula in float64 and autograd."""
    leaves = [t.detach().double().requires_grad_() for t in (step.x, step.weight, step.bias, step.residual)]
    x, weight, bias, residual = leaves
    counted = torch.ones_like(x) if step.mask is None else step.mask.double().expand(x.shape)
    n = counted.sum(step.over, keepdim=True)
    if step.stored is None:
        mean = (x * counted).sum(step.over, keepdim=True) / n
        var = ((x - mean).square() * counted).sum(step.over, keepdim=True) / n
    else:
        mean, var = (t.double() for t in step.stored)
    z = (x - mean) / (var + step.eps).sqrt() * weight + bias + residual
    y = z if step.activation is None else ACTIVATIONS[step.activation].function(z)
    names = ("dx", "dweight", "dbias", "dresidual")
    found = {"output": y.detach()}
    found |= dict(zip(names, torch.autograd.grad(y, leaves, step.dy.double()), strict=True))
    if step.running is not None:
        old = [t.double() for t in step.running]
        new = mean.detach().flatten(), (var * n / (n - 1)).detach().flatten()
        moved = [0.9 * a + 0.1 * b for a, b in zip(old, new, strict=True)]
        found |= dict(zip(("running_mean", "running_var"), moved, strict=True))
    return found


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_the_truth_is_the_derivative_of_the_formula(activation, mask, stored):
    step = a_step(activation=activation, mask=mask, stored=stored)
    found, bounds = by_autograd(step), bounds_of(step)
    assert found.keys() == bounds.keys()
    for name, result in found.items():
        torch.testing.assert_close(bounds[name].truth, result.reshape(bounds[name].truth.shape), rtol=1e-10, atol=1e-10)


def test_a_norm_about_zero_has_no_mean():
    x, weight = torch.randn(6, 9, requires_grad=True), torch.randn(9, requires_grad=True)
    dy = torch.randn(6, 9)
    bounds = bounds_of(Step(x, (1,), 1e-5, weight, centred=False, dy=dy))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = F.rms_norm(wide[0], (9,), wide[1], 1e-5)
    for name, result in zip(("output", "dx", "dweight"), (y, *torch.autograd.grad(y, wide, dy.double())), strict=True):
        torch.testing.assert_close(bounds[name].truth, result, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", UNITS)
def test_the_truth_rounded_once_passes_and_errors_past_the_bound_fail(what, dtype):
    bound = bounds_of(a_step(dtype, "silu"))[what]
    bound.check(bound.truth.to(dtype))
    allowed = bound.allowed(dtype).expand(bound.truth.shape)
    off = bound.truth.clone()
    off.view(-1)[3] += 1.5 * allowed.reshape(-1)[3]
    with pytest.raises(AssertionError, match=f"{what} in {dtype} is off by .* 1 of {off.numel()} values"):
        bound.check(off.to(dtype))


def test_twice_torchs_own_error_is_allowed_and_no_more():
    truth = torch.ones(4, dtype=torch.float64)
    bound = bound_of_any("output", truth)
    torchs = torch.tensor([1.0, 1.0, 1.001, 1.0])
    bound.check(torch.tensor([1.0, 1.0019, 1.0, 1.0]), torchs)
    with pytest.raises(AssertionError, match=r"torch's by at most 0\.001"):
        bound.check(torch.tensor([1.0, 1.0021, 1.0, 1.0]), torchs)
    with pytest.raises(AssertionError, match="off by"):
        bound.check(torch.tensor([1.0, 1.0019, 1.0, 1.0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_fails_unless_the_truth_is_the_same(bad):
    truth = torch.tensor([1.0, bad], dtype=torch.float64)
    bound = Bound("output", truth, torch.ones(()))
    bound.check(truth.float())
    for wrong in ([bad, bad], [1.0, 1.0]):
        with pytest.raises(AssertionError, match="off by inf"):
            bound.check(torch.tensor(wrong))


def test_a_result_of_another_shape_fails():
    with pytest.raises(AssertionError, match=r"output: \(3,\), not \(4,\)"):
        bound_of_any("output", torch.ones(4)).check(torch.ones(3))


def test_units_in_the_last_place():
    sizes = torch.tensor([1.0, 1.5, 2.0, 3e-3, 0.0, torch.inf])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = ulp(sizes, dtype)
        for size, unit in zip(sizes[:4].to(dtype), found[:4].tolist(), strict=True):
            assert (size.double() + unit).to(dtype).double() == size.double() + unit
            assert (size.double() + 0.4 * unit).to(dtype) == size
        assert found[4] == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert found[5] == torch.inf


def test_a_small_channel_is_not_measured_by_a_large_one():
    step = a_step()
    weight = step.weight.clone()
    weight[0, 1] = 1e5
    bound = bounds_of(Step(step.x, step.over, step.eps, weight, step.bias))["output"]
    off = bound.truth.clone()
    off[:, 0] += 1e-3
    with pytest.raises(AssertionError, match=f"{off[:, 0].numel()} of {off.numel()} values"):
        bound.check(off.float())


def test_the_slope_at_a_kink_may_be_either():
    step = a_step(activation="relu")
    bias = step.bias.clone()
    z = bounds_of(Step(step.x, step.over, step.eps, step.weight, bias, step.residual))["output"].truth
    residual = step.residual.double()
    residual[2, 3, 4, 5] -= z[2, 3, 4, 5]  # zero but for rounding
    at_kink = Step(step.x, step.over, step.eps, step.weight, bias, residual, activation="relu", dy=step.dy)
    bounds = bounds_of(at_kink)
    for name in ("dresidual", "dbias"):
        truth = bounds[name].truth.clone()
        truth.view(-1)[truth.numel() - 1] += 1.0
        with pytest.raises(AssertionError):
            bounds[name].check(truth.float())
    either = bounds["dresidual"].truth.clone()
    either[2, 3, 4, 5] = step.dy[2, 3, 4, 5] - either[2, 3, 4, 5]
    bounds["dresidual"].check(either.float())


@pytest.mark.parametrize(
    "build", [lambda: nn.BatchNorm2d(5), lambda: nn.BatchNorm2d(5).bfloat16()], ids=["float", "half"]
)
def test_torch_keeps_the_bound_near_zero(build):
    layer = build()
    dtype = layer.weight.dtype
    x, dy = (torch.randn(6, 5, 7, 8, dtype=torch.float64).to(dtype) for _ in range(2))
    running = layer.running_mean.clone(), layer.running_var.clone()
    views = [p.detach().reshape(CHANNELS) for p in layer.parameters()]
    bounds = bounds_of(Step(x, (0, 2, 3), layer.eps, *views, dy=dy, running=running))
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    bounds["output"].check(y)
    bounds["dx"].check(x.grad)
    bounds["dweight"].check(layer.weight.grad)
    bounds["running_var"].check(layer.running_var)
