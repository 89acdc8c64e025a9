"""Frozen batch normalization: nothing moves it."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from support.twins import close, randn, twins


def test_never_moves():
    layer, bn = twins(nk.FrozenBatchNorm2d)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Conv2d(4, 2, 1)).double()
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        model.train().requires_grad_(True)
        model(randn(2, 3, 6, 6)).square().sum().backward()
        optimizer.step()
    torch.optim.swa_utils.update_bn([randn(2, 3, 6, 6)], model)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
    close(layer(x := randn(2, 4, 5, 5)), bn.eval()(x))


def test_weights_of_other_libraries_frozen_norms_load():
    theirs = {
        "weight": torch.rand(4),
        "bias": torch.rand(4),
        "running_mean": torch.rand(4),
        "running_var": torch.rand(4),
    }
    layer = nk.FrozenBatchNorm2d(4)
    layer.load_state_dict(theirs, strict=True)
    assert torch.equal(layer.running_var, theirs["running_var"])


def test_needs_its_statistics():
    with pytest.raises(nk.ArgumentError, match="needs its running statistics"):
        nk.FrozenBatchNorm2d(4, track_running_stats=False)
