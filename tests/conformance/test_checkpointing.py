"""Activation checkpointing runs a forward twice: outputs and gradients do not change, and a batch counts once."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.cases import CASES


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpointed_step_equals_a_plain_one(case, use_reentrant):
    layer, x = case.layer(), case.input().requires_grad_()
    plain, plain_x = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    dy = torch.randn(case.shape)
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.backward(dy)
    z = plain(plain_x)
    z.backward(dy)
    assert torch.equal(y, z)
    assert torch.equal(x.grad, plain_x.grad)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for name, b in plain.named_buffers():
        assert torch.equal(layer.get_buffer(name), b), name
