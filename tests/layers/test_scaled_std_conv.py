"""Scaled weight standardization: the kernels, the gains, and what they keep."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.layers.scaled_std_conv import ACTIVATION_GAINS


def test_standardized_kernels_have_mean_zero_and_the_gains_length():
    layer = nk.ScaledStdConv2d(8, 5, 3, activation_gain="silu", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.add_(3)
        layer.gain.uniform_(0.5, 2)
    w = layer.standardized_weight().flatten(1)
    assert w.mean(1).abs().max() < 1e-14
    torch.testing.assert_close(w.norm(dim=1), 1.7881293296813965 * layer.gain.flatten(), rtol=1e-12, atol=0)


def test_the_weights_scale_and_offset_do_not_matter():
    layer, x = nk.ScaledStdConv2d(4, 4, 3, dtype=torch.float64), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(7).add_(5)
    torch.testing.assert_close(layer(x), y, rtol=1e-12, atol=1e-12)


def test_variance_survives_fifty_layers():
    """Every layer is off by chance, and 50 of them walk: over 24 seeds from 0.82 to 1.28, so a factor of 2 is far out.

    A convolution of torch's initialization loses a factor near 6 per layer (weights of variance 1 / (3 fan-in), and
    half of the squares to ReLU).
    """
    channels, depth = 128, 50
    sizes, options = (channels, channels, 3), {"padding": 1, "padding_mode": "circular", "bias": False}
    x = torch.randn(4, channels, 8, 8)
    for build, survives in (
        (lambda: nk.ScaledStdConv2d(*sizes, **options, activation_gain="relu"), True),
        (lambda: nn.Conv2d(*sizes, **options), False),
    ):
        z = x
        with torch.no_grad():
            for _ in range(depth):
                z = build()(F.relu(z))
        variance = z.var((0, 2, 3)).mean().item()
        assert (0.5 < variance < 2) == survives, variance
        assert survives or variance < 1e-20


def test_gains_are_one_over_the_activations_deviation():
    """The authors' constants are estimates from samples: within a thousandth of the integrals."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for name, gain in ACTIVATION_GAINS.items():
        y = z if name is None else getattr(F, name)(z)
        mean = (y * density).sum()
        assert gain == pytest.approx(((y - mean).square() * density).sum().rsqrt().item(), rel=1e-3)
        assert nk.ScaledStdConv2d(2, 2, 3, activation_gain=name).activation_gain == gain


def test_it_takes_torchs_weights_and_arguments():
    theirs = nn.Conv2d(4, 6, (3, 2), (2, 1), "valid", 2, 2, False, "reflect")
    ours = nk.ScaledStdConv2d(4, 6, (3, 2), (2, 1), "valid", 2, 2, False, "reflect")
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == ["gain"]
    assert not missing.unexpected_keys
    assert "eps=0.0001" in repr(ours)
    assert torch.equal(theirs.weight, ours.weight)
    assert ours(torch.randn(2, 4, 9, 9)).shape == theirs(torch.randn(2, 4, 9, 9)).shape
    assert list(nk.ScaledStdConv2d(4, 4, 3).state_dict()) == ["weight", "bias", "gain"]


def test_scaled_std_conv_refuses():
    for words, options in {
        r"more than 1 weight.*4 input channels in 4 groups.*\(1, 1\)": {"kernel_size": 1, "groups": 4},
        r"eps must be positive.*got 0": {"kernel_size": 3, "eps": 0},
        r"eps must be positive.*got nan": {"kernel_size": 3, "eps": math.nan},
        r"activation_gain must be a positive number.*got -1": {"kernel_size": 3, "activation_gain": -1},
        r"activation_gain must be a positive number.*got inf": {"kernel_size": 3, "activation_gain": math.inf},
        r"got 'rellu'. Did you mean .relu.": {"kernel_size": 3, "activation_gain": "rellu"},
    }.items():
        with pytest.raises(nk.ArgumentError, match=words):
            nk.ScaledStdConv2d(4, 4, **options)
    with pytest.raises(nk.DtypeError, match=r"floating point input; got torch.int64"):
        nk.ScaledStdConv2d(4, 4, 3)(torch.ones(1, 4, 5, 5).long())
