"""Channels-last in, channels-last out; contiguous in, contiguous out; the values do not know.

Norms of the channels of each position alone return them side by side, as those of timm and torchvision do.
"""

import pytest
import torch

import normkit as nk
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
    layer, x = case.layer(training=training), case.input().requires_grad_()
    y = layer(x)
    y.sum().backward()
    of_channels = isinstance(layer, nk.LayerNorm2d | nk.RMSNorm2d)
    assert y.is_contiguous(memory_format=torch.channels_last if of_channels else torch.contiguous_format)
    assert x.grad.is_contiguous()
