import numpy as np
import pytest
import torch

import normkit as nk

EPS = 0.03  # of the variances' size: leaving it out, or adding it outside the root, shows


def random_state(channels=5):
    mean = torch.randn(channels, dtype=torch.float64) * 3
    var = torch.rand(channels, dtype=torch.float64) * 0.1 + 1e-3
    weight, bias = torch.randn(2, channels, dtype=torch.float64)
    return mean, var, weight, bias


@pytest.mark.parametrize("has_weight", [True, False], ids=["weight", "no-weight"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
class TestScaleShift:
    def test_is_the_formula(self, has_weight, has_bias):
        mean, var, weight, bias = random_state()
        scale, shift = nk.scale_shift(
            nk.Moments(mean, var, 9), weight if has_weight else None, bias if has_bias else None, EPS
        )
        gamma = weight.numpy() if has_weight else 1.0
        beta = bias.numpy() if has_bias else 0.0
        expected = gamma / np.sqrt(var.numpy() + EPS)
        torch.testing.assert_close(scale, torch.tensor(expected), rtol=1e-14, atol=0)
        # Bias and mean * scale may cancel: the rounding is that of the terms.
        torch.testing.assert_close(shift, torch.tensor(beta - mean.numpy() * expected), rtol=1e-14, atol=1e-13)

    def test_gives_values_the_mean_and_spread_that_bias_and_weight_ask_for(self, has_weight, has_bias):
        _, _, weight, bias = random_state()
        x = torch.randn(50, 5, dtype=torch.float64) * 2 + 7
        var = x.var(0, correction=0)
        moments = nk.Moments(x.mean(0), var, 50)
        scale, shift = nk.scale_shift(moments, weight if has_weight else None, bias if has_bias else None, EPS)
        y = x * scale + shift
        spread = (weight if has_weight else torch.ones_like(weight)).square() * var / (var + EPS)
        torch.testing.assert_close(y.mean(0), bias if has_bias else torch.zeros_like(bias), rtol=0, atol=1e-13)
        torch.testing.assert_close(y.var(0, correction=0), spread, rtol=1e-12, atol=0)

    def test_is_differentiable(self, has_weight, has_bias):
        mean, var, weight, bias = (t.requires_grad_() for t in random_state())

        def function(mean, var, *rest):
            rest = list(rest)
            gamma = rest.pop(0) if has_weight else None
            beta = rest.pop(0) if has_bias else None
            return nk.scale_shift(nk.Moments(mean, var, 9), gamma, beta, EPS)

        assert torch.autograd.gradcheck(function, (mean, var, *[weight] * has_weight, *[bias] * has_bias))


def test_takes_statistics_that_keep_their_dimensions():
    mean, var, weight, bias = (t.reshape(1, 5, 1, 1) for t in random_state())
    scale, shift = nk.scale_shift(nk.Moments(mean, var, 9), weight, bias, EPS)
    flat = nk.scale_shift(nk.Moments(mean.flatten(), var.flatten(), 9), weight.flatten(), bias.flatten(), EPS)
    assert scale.shape == shift.shape == (1, 5, 1, 1)
    assert torch.equal(scale.flatten(), flat[0])
    assert torch.equal(shift.flatten(), flat[1])


def test_ignores_the_count_and_leaves_its_operands_alone():
    mean, var, weight, bias = random_state()
    before = [t.clone() for t in (mean, var, weight, bias)]
    few = nk.scale_shift(nk.Moments(mean, var, 2), weight, bias, EPS)
    many = nk.scale_shift(nk.Moments(mean, var, 10**6), weight, bias, EPS)
    assert torch.equal(few[0], many[0])
    assert torch.equal(few[1], many[1])
    assert all(map(torch.equal, before, (mean, var, weight, bias)))
