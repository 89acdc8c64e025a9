"""Filter response normalization: the learned eps and the threshold."""

import copy

import torch

import normkit as nk


def test_learnable_eps_is_a_parameter_per_channel_that_learns():
    layer = nk.FilterResponseNorm2d(3, eps=1e-4, learnable_eps=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == dict.fromkeys(
        ["weight", "bias", "tau", "eps"], (3,)
    )
    assert torch.equal(layer.eps, torch.full((3,), 1e-4))
    assert "eps" not in dict(nk.FilterResponseNorm2d(3).named_parameters())
    assert "tau" not in nk.FilterResponseNorm2d(3, threshold=False).state_dict()
    x = torch.randn(2, 3, 1, 1) * 1e-2
    layer(x).sum().backward()
    assert layer.eps.grad.abs().max() > 0
    fixed = nk.FilterResponseNorm2d(3, eps=1e-4)
    torch.testing.assert_close(layer(x), fixed(x))


def test_the_sign_of_a_learned_eps_says_nothing():
    layer = nk.FilterResponseNorm2d(3, learnable_eps=True)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.eps.fill_(0.3)
        other.eps.fill_(-0.3)
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(layer(x), other(x))


def test_a_new_filter_response_norm_cuts_off_at_zero():
    y = nk.FilterResponseNorm2d(3)(torch.randn(2, 3, 4, 5))
    assert y.min() == 0
    assert nk.FilterResponseNorm2d(3, threshold=False)(torch.randn(2, 3, 4, 5)).min() < 0
