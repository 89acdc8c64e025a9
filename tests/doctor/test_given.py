"""What a norm is given: the sets of values that share a statistic, wherever its channels are."""

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.doctor.evidence.given import given
from normkit.surgery.norms import norms

SIZE = 6


def looked_at(layer, x):
    (norm,) = norms(layer)
    return given(norm, 0, x, None)


@pytest.mark.parametrize("cls", [nk.LayerNorm2d, nk.RMSNorm2d])
def test_maps_as_wide_as_they_have_channels(cls):
    """Values that are the same in all channels of a position: their own variance is none, that of a line is not."""
    x = torch.randn(2, 1, 5, SIZE).expand(2, SIZE, 5, SIZE)
    found = looked_at(cls(SIZE), x)
    assert found.values == SIZE
    if cls is nk.LayerNorm2d:
        assert found.eps_over_variance > 1
        assert looked_at(nn.LayerNorm(SIZE), x).eps_over_variance < 1e-3
    assert looked_at(cls(SIZE), torch.randn(2, SIZE, 5, 9)).values == SIZE


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_channels_in_another_dimension(dim):
    x = torch.randn(2, 4, 5, SIZE).movedim(-1, dim)
    assert looked_at(nk.BatchNorm2d(SIZE, dim=dim), x).values == 2 * 4 * 5


def test_functions_of_single_values_have_no_statistics():
    found = looked_at(nk.DynamicTanh(SIZE), torch.randn(3, 4, SIZE))
    assert found.eps_over_variance is None
