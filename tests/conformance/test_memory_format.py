"""Channels-last in, channels-last out; contiguous in, contiguous out; the values do not know."""

import pytest
import torch

from support.backends import refuses_loops
from support.bounds import bound_of_any
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
    if not refuses_loops(layer, x):  # torch's operators return the layout that they return
        assert y.is_contiguous(memory_format=last)
        assert x.grad.is_contiguous(memory_format=last)
    for what, found, expected in (("output", y, z), ("dx", x.grad, plain.grad)):
        bound = bound_of_any(what, expected).allowed(torch.float32).item()  # of either, from the truth between them
        torch.testing.assert_close(found, expected, rtol=0, atol=2 * bound + case.slack(expected))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contiguous_is_kept(case, training):
    x = case.input().requires_grad_()
    y = case.layer(training=training)(x)
    y.sum().backward()
    assert y.is_contiguous()
    assert x.grad.is_contiguous()
