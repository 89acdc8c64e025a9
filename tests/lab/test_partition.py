"""Distances to boundaries, on nets small enough to check by other means."""

import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab import partition
from normkit.lab.models import initialize_
from normkit.lab.models.relu_nets import relu_conv, relu_mlp
from normkit.lab.models.toy_problem import NO_EPS


def mlp(norm, seed=0):
    model = relu_mlp(norm, 12, (7, 6), 3)
    initialize_(model, seed=seed)
    return randomized(model)


def conv(norm, seed=0):
    model = relu_conv(norm, 2, (5, 4), 3)
    initialize_(model, seed=seed)
    return randomized(model)


def randomized(model):
    """Biases and gammas of any size; beta stays zero."""
    with torch.no_grad():
        for unit in partition.units_of(model):
            if unit.layer.bias is not None:
                unit.layer.bias.normal_()
            if hasattr(unit, "norm"):
                unit.norm.weight.normal_()
    return model.double().eval()


NETS = {
    "mlp": (mlp, lambda c: nk.BatchNorm1d(c, eps=NO_EPS), (12,)),
    "conv": (conv, lambda c: nk.BatchNorm2d(c, eps=NO_EPS), (2, 9, 8)),
}


def images(shape, count=32):
    return torch.randn(count, *shape, dtype=torch.float64) * 2 + 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("net", NETS)
def test_variance_is_the_mean_squared_distance_with_a_norm_and_not_without(net, seed):
    build, norm, shape = NETS[net]
    model, plain = build(norm, seed), build(None, seed)
    x = images(shape)
    partition.store_statistics_(model, x)
    assert max(map(partition.identity_error, partition.watched(model, x))) < 1e-11
    assert min(map(partition.identity_error, partition.watched(plain, x))) > 1e-3
    other = images(shape) + 1  # whose statistics are not stored
    assert max(map(partition.identity_error, partition.watched(model, other))) > 1e-3


@pytest.mark.parametrize("net", NETS)
def test_stored_statistics_are_those_of_the_images(net):
    build, norm, shape = NETS[net]
    model, x = build(norm), images(shape)
    partition.store_statistics_(model, x)
    stored = model(x)
    model.train()
    torch.testing.assert_close(model(x), stored, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("net", NETS)
def test_layers_inputs_are_what_their_weights_are_multiplied_with(net):
    build, _, shape = NETS[net]
    model, x = build(None), images(shape)
    for unit in partition.watched(model, x):
        torch.testing.assert_close(unit.inputs @ unit.weights.T + unit.layer.bias, unit.outputs)
        normal = unit.weights[0] / unit.weights[0].norm()
        moved = unit.inputs - (unit.distances() * unit.outputs.sign())[:, :1] * normal
        on_boundary = moved @ unit.weights[0] + unit.layer.bias[0]
        torch.testing.assert_close(on_boundary, torch.zeros_like(on_boundary), rtol=0, atol=1e-10)


def test_first_order_distances_are_exact_in_the_first_layer():
    model, x = mlp(NETS["mlp"][1]), images((12,))
    partition.store_statistics_(model, x)
    first = partition.watched(model, x)[0].distances().T  # (units, N)
    found = partition.input_distances(model, x, units=7)[:7]  # all seven, in an order of their own
    torch.testing.assert_close(found.sort(0).values, first.sort(0).values)


def test_a_norm_comes_closer_than_any_bias():
    x = images((12,))
    model, plain = mlp(NETS["mlp"][1]), mlp(None)
    partition.store_statistics_(model, x)
    own, other = (partition.watched(m, x)[0].distances().square().mean(0) for m in (model, plain))
    assert (own < other).all()  # the weights are the same


def test_crossings_are_counted():
    model = relu_mlp(None, 1, (3,), 2).double()
    layer = partition.units_of(model)[0].layer
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.copy_(torch.tensor([-0.31, -0.77, 5.0]))  # they switch at 0.31, 0.77 and -5
    starts, ends = torch.zeros(4, 1, dtype=torch.float64), torch.tensor([[1.0], [0.5], [0.2], [-1.0]]).double()
    assert partition.crossings(model, starts, ends, parts=10) == [pytest.approx((2 + 1 + 0 + 0) / (4 * 3))]


def test_jitter_is_the_standard_deviation_of_the_mean():
    model = mlp(NETS["mlp"][1])
    layer = partition.units_of(model)[0].layer
    batches = [images((12,), 5) for _ in range(6)]
    means = torch.stack([layer(x).mean(0) for x in batches]).detach() / layer.weight.detach().norm(dim=1)
    assert partition.jitter(model, batches)[0] == pytest.approx(float(means.std(0).square().mean().sqrt()))
    assert partition.jitter(model, batches[:1] * 4) == pytest.approx([0.0, 0.0], abs=1e-12)


def test_shares_near_data_and_elsewhere():
    x = images((12,))
    model = relu_mlp(NETS["mlp"][1], 12, (7,), 3).double()  # units of a second may be flat
    found = partition.measured(model, x, radius=1e9)
    assert (found["near"], found["elsewhere"]) == (1.0, 1.0)
    assert partition.measured(model, x, radius=0.0)["near"] == 0.0
    deep = partition.measured(mlp(NETS["mlp"][1]), x, radius=1.0)
    assert len(deep["distances"]) == len(deep["crossings"]) == 2


def test_activations_are_modules_of_their_own():
    for norm in (None, nk.BatchNorm1d):
        activations = [unit.activation for unit in partition.units_of(relu_mlp(norm, 4, (3, 3), 2))]
        assert [type(a) for a in activations] == [nn.ReLU] * 2
    assert math.prod(relu_conv(None, 1, (2, 3), 5)(torch.zeros(4, 1, 28, 28)).shape) == 4 * 5
