"""EvoNorm and SwitchableNorm beyond the table, and what all layers of an arithmetic of their own refuse."""

import copy
import re

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_
from support.rows.mixed import ROWS

ACROSS = [case for case in ROWS if case.name != "EvoNormS0"]


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
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["instance", "layer", "batch"])
def test_switchable_with_one_kind_alone_is_that_kind(kind, training):
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


def test_switchable_starts_with_an_even_mix():
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


@pytest.mark.parametrize("name", ["WhitenedBatchNorm2d", "SwitchableNorm2d", "MovingBatchNorm2d"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_residual(name, training):
    plain = randomize_(getattr(nk, name)(6, dtype=torch.float64)).train(training)
    fused = getattr(nk, name)(6, dtype=torch.float64, activation="relu").train(training)
    fused.load_state_dict(plain.state_dict())
    x, r = images(), images()
    torch.testing.assert_close(fused(x, residual=r), torch.relu(plain(x) + r))


@pytest.mark.parametrize("name", ["WhitenedBatchNorm2d", "SwitchableNorm2d", "MovingBatchNorm2d", "EvoNormB0"])
def test_an_empty_batch_in_evaluation(name):
    layer = getattr(nk, name)(6).eval()
    assert layer(torch.randn(0, 6, 3, 5)).shape == (0, 6, 3, 5)


def refused(layer, error, words, x, **extras):
    """The call raises `error` with these words in its message, and the layer is as it was."""
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=".*".join(map(re.escape, words))) as caught:
        layer(x, **extras)
    assert isinstance(caught.value, nk.NormkitError)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_bad_input(case, training):
    layer, x, channels = case.layer(training=training), case.input(), case.shape[1]
    who = f"{case.name}({channels}) needs"
    refused(layer, ValueError, [who, f"(N, {channels}", f"got {tuple(x[0, 0].shape)}", "unsqueeze"], x[0, 0])
    wide = torch.cat([x, x], 1)
    refused(layer, ValueError, [who, f"got {tuple(wide.shape)}", "number of channels"], wide)
    refused(layer, TypeError, [who, "floating point", "torch.int64", "x.float()"], x.long())
    if not case.name.startswith("Evo"):
        refused(layer, ValueError, [who, "residual", f"{case.shape}", "shortcut"], x, residual=x[:1])


@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_one_value_per_channel_in_training(case):
    for n in (0, 1):
        x = torch.randn(n, case.shape[1], *[1] * (len(case.shape) - 2))
        words = [f"{case.name}({case.shape[1]}) needs more than 1 value per channel", f"got input {tuple(x.shape)}"]
        refused(case.layer(), ValueError, words, x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_groups_of_one_value(training):
    words = ["EvoNormS0(6) needs more than 1 value per group", "(4, 6, 1, 1)", "fewer groups"]
    refused(nk.EvoNormS0(6, 6).train(training), ValueError, words, torch.randn(4, 6, 1, 1))
    assert nk.EvoNormS0(6, 3)(torch.randn(4, 6, 1, 1)).isfinite().all()


@pytest.mark.parametrize("name", sorted({case.name for case in ROWS}))
def test_bad_options(name):
    cls = getattr(nk, name)
    sizes = (6, 3) if name == "EvoNormS0" else (6,)
    for eps in (0.0, -1e-5, float("nan")):
        with pytest.raises(nk.ArgumentError, match=f"eps must be positive.*got {eps}"):
            cls(*sizes, eps=eps)
    with pytest.raises(nk.ArgumentError, match=r"affine must be True.*got 'gamma'"):
        cls(*sizes, affine="gamma")
    if name != "EvoNormS0":
        with pytest.raises(nk.ArgumentError, match=r"momentum must lie in 0\.\.1.*got 1.1"):
            cls(6, momentum=1.1)
    if not name.startswith("Evo"):
        with pytest.raises(nk.ArgumentError, match=r"activation must be one of.*got 'softmax'"):
            cls(6, activation="softmax")


@pytest.mark.parametrize("groups", [0, 4, 32])
def test_groups_that_do_not_divide(groups):
    with pytest.raises(
        nk.ArgumentError, match=f"groups must divide the 6 channels; got {groups}. Use one of 1, 2, 3, 6"
    ):
        nk.EvoNormS0(6, groups)
    with pytest.raises(nk.ArgumentError, match=f"group_size must divide the 6 .*got {groups}. Use one of 1, 2, 3, 6"):
        nk.WhitenedBatchNorm2d(6, group_size=groups)


def test_bad_options_of_whitening():
    with pytest.raises(nk.ArgumentError, match='method must be "newton" or "zca"; got \'pca\''):
        nk.WhitenedBatchNorm1d(6, method="pca")
    with pytest.raises(nk.ArgumentError, match="iterations must be at least 1; got 0"):
        nk.WhitenedBatchNorm1d(6, iterations=0)
