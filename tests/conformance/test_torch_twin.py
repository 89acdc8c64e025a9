"""Where torch has the layer, ours gives the same output, gradients and buffers over several steps."""

import pytest
import torch

from support.cases import TWINS


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_agrees_with_torch_in_float64(case, training):
    ours = case.layer(torch.float64, training)
    theirs = case.torch_layer(ours)
    for _ in range(3):
        x = case.input(torch.float64).requires_grad_()
        twin_x = x.detach().clone().requires_grad_()
        y, twin_y = ours(x), theirs(twin_x)
        dy = torch.randn_like(y)
        y.backward(dy)
        twin_y.backward(dy)
        torch.testing.assert_close(y, twin_y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, twin_x.grad, rtol=1e-11, atol=1e-12)
    for (name, p), twin in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, twin.grad, rtol=1e-11, atol=1e-11, msg=name)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_nonfinite_input_says_so_as_in_torch(case, bad):
    ours = case.layer()
    theirs = case.torch_layer(ours)
    x = case.input()
    x.flatten()[x.numel() // 2] = bad
    y, twin_y = ours(x), theirs(x)
    assert not y.isfinite().all()
    torch.testing.assert_close(y.isfinite(), twin_y.isfinite())
    for name, buffer in theirs.named_buffers():
        # The same infinities and the same NaN, channel by channel.
        torch.testing.assert_close(ours.get_buffer(name), buffer, equal_nan=True)
