"""Group normalization: masks, and groups that do not come out even."""

import pytest
import torch

import normkit as nk
from support.cases import randomize_
from support.refusal import refused

DOUBLE = torch.float64


def test_an_example_without_a_valid_position_becomes_bias_and_residual():
    layer = randomize_(nk.GroupNorm(2, 6, activation="relu"))
    x, r = torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    y = layer(x, residual=r, mask=torch.tensor([[False] * 5, [True] * 5]))
    torch.testing.assert_close(y[0], (layer.bias[:, None] + r[0]).relu())


@pytest.mark.parametrize("activation", [None, pytest.param("gelu", marks=pytest.mark.deep)], ids=str)
def test_gradients_of_mask_and_residual(activation):
    x, r = (torch.randn(3, 4, 5, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(4, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])

    def run(x, w, b, r):
        return nk.functional.group_norm(x, 2, w, b, activation=activation, residual=r, mask=mask)

    assert torch.autograd.gradcheck(run, (x, w, b, r), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, w, b, r), check_fwd_over_rev=True)


def test_groups_that_do_not_come_out_even():
    words = ["num_groups must divide the 6 channels", "got 4", "one of 1, 2, 3, 6"]
    refused(lambda: nk.GroupNorm(4, 6), "GroupNorm", *words)
    refused(lambda: nk.functional.group_norm(torch.randn(2, 6, 3), 4), "group_norm", *words)
    refused(lambda: nk.GroupNorm(0, 6), "got 0")
