"""EvoNorm, value by value, and what it refuses."""

import copy

import pytest
import torch

import normkit as nk
from support.cases import randomize_
from support.refusal import refused_untouched


def images(*shape):
    return torch.randn(*(shape or (4, 6, 3, 5)), dtype=torch.float64) * 1.3 + 0.3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_evo_b0_value_by_value(training):
    layer, x = randomize_(nk.EvoNormB0(6, dtype=torch.float64)).train(training), images()
    y = copy.deepcopy(layer)(x)
    for n in range(4):
        for c in range(6):
            batch = x[:, c].var(correction=0) if training else layer.running_var[c]
            instance = x[n, c].var(correction=0)
            for value, found in zip(x[n, c].flatten(), y[n, c].flatten(), strict=True):
                below = max((batch + 1e-5).sqrt(), layer.v[c] * value + (instance + 1e-5).sqrt())
                torch.testing.assert_close(found, value / below * layer.weight[c] + layer.bias[c])


def test_evo_b0_keeps_the_unbiased_variance():
    layer, x = nk.EvoNormB0(6, momentum=0.25, dtype=torch.float64), images()
    layer(x)
    torch.testing.assert_close(layer.running_var, 0.75 + 0.25 * x.transpose(0, 1).flatten(1).var(1))
    assert layer.num_batches_tracked == 1
    before = copy.deepcopy(layer.state_dict())
    layer.eval()(x)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_evo_s0_group_by_group(groups, training):
    layer, x = randomize_(nk.EvoNormS0(6, groups, dtype=torch.float64)).train(training), images()
    y, size = layer(x), 6 // groups
    for n in range(4):
        for c in range(6):
            first = c // size * size
            std = (x[n, first : first + size].var(correction=0) + 1e-5).sqrt()
            expected = x[n, c] * torch.sigmoid(layer.v[c] * x[n, c]) / std * layer.weight[c] + layer.bias[c]
            torch.testing.assert_close(y[n, c], expected)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_groups_of_one_value(training):
    words = ["EvoNormS0(6) needs more than 1 value per group", "(4, 6, 1, 1)", "fewer groups"]
    layer = nk.EvoNormS0(6, 6).train(training)
    refused_untouched(layer, lambda: layer(torch.randn(4, 6, 1, 1)), *words)
    assert nk.EvoNormS0(6, 3)(torch.randn(4, 6, 1, 1)).isfinite().all()


@pytest.mark.parametrize("groups", [0, 4, 32])
def test_groups_that_do_not_divide(groups):
    words = f"groups must divide the 6 channels; got {groups}. Use one of 1, 2, 3, 6"
    with pytest.raises(nk.ArgumentError, match=words):
        nk.EvoNormS0(6, groups)
