"""SwitchableNorm: each kind of statistics alone, and their mix."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_


def images(*shape):
    return torch.randn(*(shape or (4, 6, 3, 5)), dtype=torch.float64) * 1.3 + 0.3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["instance", "layer", "batch"])
def test_with_one_kind_alone_is_that_kind(kind, training):
    layer = randomize_(nk.SwitchableNorm2d(6, dtype=torch.float64)).train(training)
    for weight in (layer.mean_weight, layer.var_weight):
        nn.init.zeros_(weight)
        weight.data[kind] = 1000.0  # all of the softmax
    torchs = [
        nn.InstanceNorm2d(6, affine=True, dtype=torch.float64),
        nn.GroupNorm(1, 6, dtype=torch.float64),
        nn.BatchNorm2d(6, dtype=torch.float64),
    ][kind].train(training)
    torchs.load_state_dict({name: layer.state_dict()[name].clone() for name in torchs.state_dict()})
    for _ in range(3):
        x = images().requires_grad_()
        y, z = layer(x), torchs(x)
        dy = torch.randn_like(y)
        torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(*(torch.autograd.grad(t, x, dy)[0] for t in (y, z)), rtol=1e-10, atol=1e-12)
    if kind == 2:
        for name, b in torchs.named_buffers():
            torch.testing.assert_close(layer.get_buffer(name), b)


def test_starts_with_an_even_mix():
    layer, x = nk.SwitchableNorm2d(6, dtype=torch.float64), images()
    over = [(2, 3), (1, 2, 3), (0, 2, 3)]
    mean = sum(x.mean(o, keepdim=True) for o in over) / 3
    var = sum(x.var(o, correction=0, keepdim=True) for o in over) / 3
    torch.testing.assert_close(layer(x), (x - mean) / (var + 1e-5).sqrt())


def test_means_and_variances_are_weighted_apart():
    layer, x = nk.SwitchableNorm2d(6, dtype=torch.float64), images()
    layer.mean_weight.data, layer.var_weight.data = torch.tensor([[1000.0, 0, 0], [0, 0, 1000.0]]).double()
    var = x.var((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(layer(x), (x - x.mean((2, 3), keepdim=True)) / (var + 1e-5).sqrt())
