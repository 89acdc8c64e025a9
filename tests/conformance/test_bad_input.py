"""Bad input gets an error that says what was needed, what came and what to do, and changes nothing."""

import copy
import re

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import CASES

BATCH = [case for case in CASES if isinstance(case.build(), nn.modules.batchnorm._BatchNorm)]


def refused(layer, error, words, *args, **kwargs):
    """The call raises `error` with these words in its message, and the layer is as it was."""
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=".*".join(map(re.escape, words))) as caught:
        layer(*args, **kwargs)
    assert isinstance(caught.value, nk.NormkitError)
    for name, t in layer.state_dict().items():
        torch.testing.assert_close(t, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_wrong_rank(case, training):
    x = case.input().flatten()
    words = ["needs (N, ", f"got {tuple(x.shape)}", "unsqueeze"]
    refused(case.layer(training=training), ValueError, words, x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_wrong_channels(case, training):
    x = torch.cat([case.input()] * 2, dim=1)
    words = [f"{case.name}({case.shape[1]}", f"needs (N, {case.shape[1]}", f"got {tuple(x.shape)}", "channels"]
    refused(case.layer(training=training), ValueError, words, x)


def test_channels_in_the_last_dimension_are_recognized():
    refused(nk.BatchNorm2d(3), ValueError, ["(N, 3, H, W)", "(2, 8, 8, 3)", "movedim(-1, 1)"], torch.randn(2, 8, 8, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_input_that_is_not_floating_point(case, dtype):
    words = ["floating point", str(dtype), "x.float()"]
    refused(case.layer(), TypeError, words, case.input().to(dtype))


@pytest.mark.parametrize("case", BATCH, ids=str)
def test_one_value_per_channel_in_training(case):
    x = case.input(shape=tuple(1 if d in case.free else n for d, n in enumerate(case.shape)))
    refused(case.layer(), ValueError, ["more than 1 value per channel", f"got input {tuple(x.shape)}", "drop_last"], x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_a_mask_of_another_shape(case, training):
    positions = (case.shape[0], *case.shape[2:])
    mask = torch.ones(*positions, 2, dtype=torch.bool)
    words = [f"a mask of shape {positions}", f"got {tuple(mask.shape)}"]
    refused(case.layer(training=training), ValueError, words, case.input(), mask=mask)


@pytest.mark.parametrize("case", BATCH, ids=str)
def test_a_mask_that_is_not_boolean(case):
    mask = torch.ones(case.shape[0], *case.shape[2:])
    refused(case.layer(), TypeError, ["boolean mask", "float32", "> 0.5"], case.input(), mask=mask)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_a_mask_that_leaves_too_little(case, kept):
    mask = torch.zeros(case.shape[0], *case.shape[2:], dtype=torch.bool)
    mask.flatten()[:kept] = True
    refused(case.layer(), ValueError, ["more than 1 value per channel", "mask"], case.input(), mask=mask)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_a_residual_of_another_shape(case, training):
    residual = case.input()[:1]
    words = [f"input's shape {case.shape}", f"got {tuple(residual.shape)}", "shortcut"]
    refused(case.layer(training=training), ValueError, words, case.input(), residual=residual)


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_eps_that_is_not_positive(name, eps):
    with pytest.raises(ValueError, match=f"eps must be positive.*got {eps}.*1e-5"):
        getattr(nk, name)(3, eps=eps)


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_momentum_outside_its_range(name, momentum):
    with pytest.raises(ValueError, match=f"momentum must lie in 0..1.*got {momentum}.*0.99 is 0.01"):
        getattr(nk, name)(3, momentum=momentum)


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match=r"'leakyrelu'.*Did you mean .leaky_relu."):
        nk.BatchNorm2d(3, activation="leakyrelu")
    with pytest.raises(nk.ArgumentError, match=r"one of .relu., .*got 'softmax'\.$"):
        nk.BatchNorm2d(3, activation="softmax")


def test_an_unknown_affine_or_nonfinite():
    with pytest.raises(nk.ArgumentError, match=r"affine must be .*got 'gamma'"):
        nk.BatchNorm2d(3, affine="gamma")
    with pytest.raises(nk.ArgumentError, match=r"bias alone; got bias=False"):
        nk.BatchNorm2d(3, affine="shift", bias=False)
    with pytest.raises(nk.ArgumentError, match='nonfinite must be one of "propagate", "raise", "skip-update"; got'):
        nk.BatchNorm2d(3, nonfinite="ignore")


def test_the_function_refuses_what_the_layers_refuse():
    x, stat = torch.randn(4, 3, 5), torch.ones(3)
    F = nk.functional
    for words, call in {
        "needs .N, 3": lambda: F.batch_norm(x[:, :2], stat, stat),
        "eps must be positive": lambda: F.batch_norm(x, stat, stat, eps=0),
        "momentum must lie": lambda: F.batch_norm(x, stat, stat, training=True, momentum=2),
        "activation must be": lambda: F.batch_norm(x, stat, stat, activation="step"),
        "nonfinite must be": lambda: F.batch_norm(x, stat, stat, nonfinite="no"),
        "both running_mean and running_var": lambda: F.batch_norm(x, stat, None, training=True),
        "in evaluation; got None": lambda: F.batch_norm(x, None, None),
        "weight of shape .3,.*got .4,": lambda: F.batch_norm(x, stat, stat, torch.ones(4)),
        "bias of shape .3,.*got .4,": lambda: F.batch_norm(x, stat, stat, None, torch.ones(4), training=True),
        "running_var of shape .3,.*got .2,": lambda: F.batch_norm(x, stat, torch.ones(2)),
        "running_var of shape .3,.*got .2, 3": lambda: F.batch_norm(x, stat, torch.ones(2, 3), training=True),
        "moments.var of shape .3,.*got .4,": lambda: F.batch_norm_update(x, nk.Moments(stat, torch.ones(4), 0)),
        "needs .N, 4, .*got .2, 3, 1, 1, 1, 1": lambda: F.batch_norm(
            torch.ones(2, 3, 1, 1, 1, 1), *[torch.ones(4)] * 2
        ),
        "more than 1 value": lambda: F.batch_norm_update(x[:1, :, :1], nk.Moments(stat, stat, 0)),
        "batch_moments needs": lambda: F.batch_moments(torch.randn(3)),
    }.items():
        with pytest.raises(nk.NormkitError, match=words):
            call()
    assert torch.equal(stat, torch.ones(3))
