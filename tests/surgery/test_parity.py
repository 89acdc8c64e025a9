"""The largest difference, and the first layer that brings it."""

import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.parity import ExampleError, compare, difference, trace


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.Tanh()).double()


X = torch.randn(6, 4, dtype=torch.float64)


def test_a_model_is_like_itself():
    assert compare(trace(net(), X), trace(net(), X)) == (0, 0, None)


def test_the_first_layer_that_differs_is_named():
    other = net()
    with torch.no_grad():
        other[2].bias[1] += 0.5
    found = compare(trace(net(), X), trace(other, X))
    assert found.first_layer == "2"
    gap = (net()(X) - other(X)).abs().max().item()
    assert found.max_abs == pytest.approx(gap)
    assert found.max_rel == pytest.approx(gap / net()(X).abs().max().item())


def test_layers_that_are_meant_to_differ_are_not_named():
    other = net()
    with torch.no_grad():
        other[0].weight *= 2
    assert compare(trace(net(), X), trace(other, X), meant={"0"}).first_layer == "1"


def test_rounding_is_measured_and_not_blamed_on_a_layer():
    other = net()
    with torch.no_grad():
        other[0].weight *= 1 + 1e-15
    found = compare(trace(net(), X), trace(other, X))
    assert 0 < found.max_rel < 1e-14
    assert found.first_layer is None


def test_a_layer_that_is_called_twice_is_compared_call_by_call():
    class Twice(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.layer, self.gain, self.other = nn.Tanh(), gain, nn.Identity()

        def forward(self, x):
            return self.layer(self.other(self.layer(x)) * self.gain)

    assert compare(trace(Twice(1.0), X), trace(Twice(2.0), X)).first_layer == "layer"


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        ([1.0, -2.0], [1.0, -1.5], (0.5, 0.25)),
        ([math.nan, 1.0], [math.nan, 1.0], (0.0, 0.0)),
        ([math.inf, 1.0], [math.inf, 1.0], (0.0, 0.0)),
        ([math.nan, 1.0], [0.0, 1.0], (math.inf, math.inf)),
        ([0.0, 0.0], [0.0, 1.0], (1.0, math.inf)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_differences(a, b, gap):
    assert difference(torch.tensor(a), torch.tensor(b)) == gap


def test_another_shape_is_infinitely_far():
    assert compare(trace(nn.Identity(), X), trace(nn.Flatten(0), X))[:2] == (math.inf, math.inf)


def test_tracing_leaves_the_model_alone():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, X)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_does_not_run_says_what_it_was_given():
    with pytest.raises(ExampleError, match=r"Sequential does not run on the example \(\(6, 7\)\): RuntimeError"):
        trace(net(), torch.randn(6, 7))
    with pytest.raises(nk.ShapeError):  # our own layers say it better
        trace(nk.BatchNorm1d(3), torch.randn(6, 7))
