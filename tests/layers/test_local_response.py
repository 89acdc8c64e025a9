"""Local response normalization beyond the table."""

import torch
from torch import nn

import normkit as nk

DOUBLE = torch.float64


def test_a_neighbourhood_wider_than_the_channels():
    x = torch.randn(2, 3, 4, dtype=DOUBLE)
    torch.testing.assert_close(nk.LocalResponseNorm(9, 0.5)(x), nn.LocalResponseNorm(9, 0.5)(x))
