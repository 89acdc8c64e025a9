"""Channels-last in, channels-last out; contiguous in, contiguous out; the values do not know."""

import pytest
import torch

from support.cases import CASES

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SPATIAL = [case for case in CASES if len(case.shape) in FORMATS]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", SPATIAL, ids=str)
def test_channels_last_is_kept(case, training):
    last = FORMATS[len(case.shape)]
    layer, twin = case.layer(training=training), case.build().train(training)
    twin.load_state_dict(layer.state_dict())
    plain = case.input().requires_grad_()
    x = plain.detach().contiguous(memory_format=last).requires_grad_()
    y, z = layer(x), twin(plain)
    dy = torch.randn_like(z)
    y.backward(dy.contiguous(memory_format=last))
    z.backward(dy)
    assert y.is_contiguous(memory_format=last)
    assert x.grad.is_contiguous(memory_format=last)
    torch.testing.assert_close(y, z, rtol=2e-7, atol=1e-7 + case.slack(z))
    torch.testing.assert_close(x.grad, plain.grad, rtol=2e-7, atol=1e-7 + case.slack(plain.grad))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contiguous_is_kept(case, training):
    x = case.input().requires_grad_()
    y = case.layer(training=training)(x)
    y.sum().backward()
    assert y.is_contiguous()
    assert x.grad.is_contiguous()
