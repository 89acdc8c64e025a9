"""Channels-last in, channels-last out; contiguous in, contiguous out; the values do not know."""

import pytest
import torch

from support.backends import refuses_loops
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
    units = 1
    if refuses_loops(layer, x):
        units = 16  # torch's operators return the layout and the last digits that they return
    else:
        assert y.is_contiguous(memory_format=last)
        assert x.grad.is_contiguous(memory_format=last)
    for found, expected in ((y, z), (x.grad, plain.grad)):
        most = expected.detach().abs().max().item()
        atol = 1e-7 * (1 if units == 1 else units * most) + case.slack(expected)
        torch.testing.assert_close(found, expected, rtol=2e-7 * units, atol=atol)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contiguous_is_kept(case, training):
    x = case.input().requires_grad_()
    y = case.layer(training=training)(x)
    y.sum().backward()
    assert y.is_contiguous()
    assert x.grad.is_contiguous()
