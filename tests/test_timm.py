"""normkit.timm and timm itself: its models with our layers, its norm-act options, and its converters."""

import copy
import importlib
import sys
from functools import partial

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError, MissingExtraError, UnsupportedError
from normkit.layers.norm_layer import NormLayer
from support import aside  # noqa: F401  # where timm is
from support.cases import randomize_
from support.depth import thinned

timm = pytest.importorskip("timm")
nkt = importlib.import_module("normkit.timm")
norm_act_layers = importlib.import_module("timm.layers.norm_act")
efficientnet_builder = importlib.import_module("timm.models._efficientnet_builder")

BatchNormAct2d = norm_act_layers.BatchNormAct2d

pytestmark = pytest.mark.deep  # see tests/conftest.py


def mobilenetv3(norm):
    """timm's names of it take no norm_layer=; its class does."""
    blocks = [["ds_r1_k3_s2_e1_c16_se0.25_nre"], ["ir_r1_k5_s2_e4_c24_se0.25"], ["cn_r1_k1_s1_c32"]]
    return timm.models.mobilenetv3.MobileNetV3(
        efficientnet_builder.decode_arch_def(blocks), 5, act_layer=nn.Hardswish, norm_layer=norm
    )


def densenet(norm):
    return timm.models.densenet.DenseNet(8, (2, 2), 5, norm_layer=norm)


def resnetv2(norm):
    return timm.models.resnetv2.ResNetV2(
        [1, 1], (32, 64), 5, stem_chs=16, norm_layer=norm, conv_layer=timm.layers.create_conv2d, preact=False
    )


def named(name):
    return lambda norm: timm.create_model(name, norm_layer=norm, num_classes=5)


MODELS = {
    "efficientnet_b0": named("efficientnet_b0"),  # SiLU
    "efficientnet_lite0": named("efficientnet_lite0"),  # ReLU6
    "regnety_002": named("regnety_002"),
    "mobilenetv3": mobilenetv3,  # Hardswish and ReLU
    "densenet": densenet,
    "resnetv2": resnetv2,
    "resnetv2 preactivated": partial(
        timm.models.resnetv2.ResNetV2, [1, 1], (32, 64), 5, stem_chs=16, conv_layer=timm.layers.create_conv2d
    ),
    "ese_vovnet19b_slim": named("ese_vovnet19b_slim"),
    "repvgg_a0": named("repvgg_a0"),
    "resnet10t": named("resnet10t"),  # norms and activations apart
}


def built(name, norm):
    build = MODELS[name]
    return build(norm_layer=norm) if isinstance(build, partial) else build(norm)


def norms_of(model):
    return [layer for layer in model.modules() if isinstance(layer, NormLayer)]


def at_random(model):
    """Convolutions as timm begins them; norms at random."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            randomize_(layer)
            layer.num_batches_tracked.zero_()
    return model


QUICK = {"mobilenetv3", "densenet", "resnetv2"}


@pytest.mark.parametrize("name", thinned(MODELS, QUICK.__contains__))
def test_models_are_built_with_our_layers(name):
    """The same weights under the same names, the same outputs in training and evaluation, the same statistics.

    In double: what rounding does to one layer's output, the norms behind it scale up.
    """
    theirs = at_random(built(name, nn.BatchNorm2d)).double()
    ours = built(name, nk.BatchNorm2d).double()
    kinds = {type(layer) for layer in ours.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    assert kinds == {nk.BatchNorm2d}
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    for mode in (False, True, False):
        outputs = []
        for model in (theirs, ours):
            torch.manual_seed(0)  # of dropout
            outputs.append(model.train(mode)(x))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-8, atol=1e-8 * outputs[0].abs().max().item())
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-8, atol=1e-8)


OTHERS = {
    "ghost": (lambda: partial(nk.GhostBatchNorm2d, chunk_size=2), nk.GhostBatchNorm2d),
    "renorm": (lambda: nk.BatchRenorm2d, nk.BatchRenorm2d),
    "frozen": (lambda: nk.FrozenBatchNorm2d, nk.FrozenBatchNorm2d),
    "sync": (lambda: nk.SyncBatchNorm, nk.SyncBatchNorm),
    "group": (lambda: partial(nk.GroupNorm, num_groups=4), nk.GroupNorm),
    "instance": (lambda: partial(nk.InstanceNorm2d, affine=True), nk.InstanceNorm2d),
    "switchable": (lambda: nk.SwitchableNorm2d, nk.SwitchableNorm2d),
    "by name": (lambda: nkt.norm_act("group", groups=4), nk.GroupNorm),
    "factory": (lambda: nk.norm_layer("group", groups=4), nk.GroupNorm),
    "class": (lambda: nkt.norm_act(nk.BatchNorm2d, eps=1e-3), nk.BatchNorm2d),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_get_the_activation_too(name):
    """Ghost, Renorm and Frozen raised in timm; a plain function got no activation."""
    norm, kind = OTHERS[name]
    block = timm.layers.ConvNormAct(3, 8, 3, norm_layer=norm(), act_layer=nn.SiLU).eval()
    randomize_(block)
    assert type(block.bn) is kind
    bare = copy.deepcopy(block.bn)
    bare.activation = None
    before = bare(block.conv(torch.ones(2, 3, 5, 5)))
    torch.testing.assert_close(block(torch.ones(2, 3, 5, 5)), nn.functional.silu(before))


@pytest.mark.parametrize("name", ["ghost", "factory"])
def test_other_norms_train_in_models(name):
    model = mobilenetv3(OTHERS[name][0]())
    assert len(norms_of(model)) == len(norms_of(mobilenetv3(nk.BatchNorm2d)))
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


OPTIONS = {
    "default": {},
    "act as class": {"act_layer": nn.SiLU},
    "act as name": {"act_layer": "hard_swish"},
    "no act": {"act_layer": None},
    "apply_act": {"apply_act": False, "act_layer": nn.ReLU},
    "act_kwargs": {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.2}},
    "not inplace": {"inplace": False, "act_layer": "gelu"},
    "timm's own class": {"act_layer": timm.layers.GELUTanh},
    "a function": {"act_layer": partial(nn.ELU, alpha=0.5)},
    "drop": {"drop_layer": partial(timm.layers.DropBlock2d, drop_prob=0.4, block_size=2)},
    "drop alone": {"drop_layer": partial(nn.Dropout, p=0.4), "apply_act": False},
    "dtype": {"dtype": torch.float64},
    "momentum": {"momentum": 0.3, "eps": 0.1},
    "cumulative": {"momentum": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_norm_act_options_do_what_timms_do(name):
    options = OPTIONS[name]
    theirs = randomize_(timm.layers.create_norm_act_layer("batchnorm2d", 6, **options))
    ours = timm.layers.create_norm_act_layer(nk.BatchNorm2d, 6, **options)
    assert type(ours) is nk.BatchNorm2d
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 6, 5, 5, dtype=options.get("dtype", torch.float32))
    for mode in (True, False):
        found = []
        for layer in (theirs, ours):
            torch.manual_seed(1)
            y = layer.train(mode)(x.clone().requires_grad_())
            y.square().sum().backward()
            found.append(y.detach())
        torch.testing.assert_close(*found)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drop", [None, partial(nn.Dropout, p=0.1)])
def test_parameters_of_an_activation_keep_timms_names(drop):
    options = {"act_layer": nn.PReLU, "act_kwargs": {"num_parameters": 6}, "drop_layer": drop}
    theirs = randomize_(BatchNormAct2d(6, **options)).eval()
    ours = timm.layers.create_norm_act_layer(nk.BatchNorm2d, 6, **options).eval()
    ours = copy.deepcopy(ours)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 3, 3)
    torch.testing.assert_close(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict())


def test_timms_own_layers_are_found_as_before():
    get = timm.layers.get_norm_act_layer
    assert get(None) is None
    assert get(nn.BatchNorm2d, nn.ReLU).func is BatchNormAct2d
    assert get("batchnorm", nn.ReLU).func is BatchNormAct2d
    assert get(partial(timm.layers.GroupNormAct, group_size=2), "relu").keywords["group_size"] == 2
    assert get(timm.layers.EvoNorm2dS0) is timm.layers.EvoNorm2dS0
    twice = get(get(nk.BatchNorm2d, nn.SiLU), nn.ReLU)  # timm's rule: the first that was bound stays
    assert twice(4).activation == "silu"


def test_every_name_under_which_timm_has_it_is_ours():
    holders = [module for name, module in sys.modules.items() if name.startswith("timm.")]
    found = {vars(holder)["get_norm_act_layer"] for holder in holders if "get_norm_act_layer" in vars(holder)}
    assert len(found) == 1
    assert found.pop().__wrapped__.__module__ == "timm.layers.create_norm_act"


def test_bad_input():
    get = timm.layers.get_norm_act_layer
    with pytest.raises(ArgumentError, match=r"timm drops the positional arguments of partial\(GroupNorm, 32\)"):
        get(partial(nk.GroupNorm, 32), nn.ReLU)
    with pytest.raises(ArgumentError, match="EvoNormB0 brings its own nonlinearity"):
        get(nk.EvoNormB0, nn.ReLU)
    with pytest.raises(ArgumentError, match="norm_act makes layers of normkit; got BatchNorm2d of torch"):
        nkt.norm_act(nn.BatchNorm2d)
    with pytest.raises(ArgumentError, match="grop"):
        nkt.norm_act("grop")
    with pytest.raises(ArgumentError, match="activation"):
        nkt.norm_act("evo-s0")
    with pytest.raises(ArgumentError, match="chunks"):
        nkt.norm_act("ghost", chunks=2)
    with pytest.raises(ArgumentError, match="got relu of torch"):
        nkt.norm_act(torch.relu)
    with pytest.raises(TypeError, match="chunks"):
        get(partial(nk.GhostBatchNorm2d, chunks=2), nn.ReLU)(4)
    with pytest.raises(AssertionError):  # timm's own
        get(3)


@pytest.mark.parametrize("num_splits", [2, 3])
def test_split_norms_are_timms(num_splits):
    """Arguments in timm's order, weights under its names, and the same steps of training."""
    options = (6, 1e-3, 0.3, True, True, num_splits)
    theirs = randomize_(timm.layers.SplitBatchNorm2d(*options)).double()
    ours = nk.SplitBatchNorm2d(*options).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for mode in (True, True, False):
        x = torch.randn(12, 6, 4, 4, dtype=torch.float64)
        found = []
        for layer in (ours, theirs):
            layer.zero_grad()
            y = layer.train(mode)(x)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in layer.parameters() if p.grad is not None)])
        for mine, its in zip(*found, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
    for name, t in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], t, rtol=1e-12, atol=1e-12)
    theirs.load_state_dict(ours.state_dict())


def test_converted_to_split_norms_as_timm_does():
    model = at_random(timm.layers.ConvNormAct(3, 8, 3, norm_layer=nn.BatchNorm2d)).double()
    ours = nk.convert(model, "split", num_splits=2).model
    theirs = timm.layers.convert_splitbn_model(copy.deepcopy(model), num_splits=2)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    for mode in (True, False):
        torch.testing.assert_close(ours.train(mode)(x), theirs.train(mode)(x), rtol=1e-10, atol=1e-10)
    norms = [{name for name in model.state_dict() if "bn" in name} for model in (ours, theirs)]
    assert norms[0] == norms[1]
    with pytest.raises(UnsupportedError, match="auxiliary norms for parts of a batch"):
        timm.layers.convert_splitbn_model(nk.SplitBatchNorm2d(8))


CONVERTERS = {
    "convert_sync_batchnorm": (nk.BatchNorm2d(8, activation="relu"), "nk.convert"),
    "freeze_batch_norm_2d": (nk.BatchNorm2d(8, activation=nn.Hardswish()), "nk.freeze"),
    "unfreeze_batch_norm_2d": (nk.FrozenBatchNorm2d(8), "nk.unfreeze"),
}


@pytest.mark.parametrize("name", CONVERTERS)
def test_converters_refuse_what_they_would_lose(name):
    """timm would drop the activation, or pass a frozen layer by; nothing is changed when it is refused."""
    layer, instead = CONVERTERS[name]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sequential(copy.deepcopy(layer)))
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=rf"timm's {name} would not keep .* 2\.0 is the first. Use {instead}"):
        getattr(timm.layers, name)(model)
    assert [type(module) for module in model.modules()] == before
    for other in (nk.GhostBatchNorm2d(8), nk.BatchRenorm2d(8), nk.BatchNorm2d(8, affine="scale")):
        if name != "unfreeze_batch_norm_2d":
            with pytest.raises(UnsupportedError, match="the model itself is the first"):
                getattr(timm.layers, name)(other)


def test_converters_keep_the_function_of_plain_layers():
    model = randomize_(nn.Sequential(nn.Conv2d(3, 8, 3), nk.BatchNorm2d(8, eps=1e-2), nk.FrozenBatchNorm2d(8))).eval()
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    for name in ("convert_sync_batchnorm", "freeze_batch_norm_2d"):
        done = getattr(timm.layers, name)(copy.deepcopy(model))
        assert type(done[1]) is not nk.BatchNorm2d
        torch.testing.assert_close(done.eval()(x), expected)


def test_timms_freeze_and_pruning_refuse_too():
    model = timm.layers.ConvNormAct(3, 8, 3, norm_layer=nk.BatchNorm2d)
    with pytest.raises(UnsupportedError, match="freeze_batch_norm_2d"):
        timm.utils.freeze(model, ["bn"])
    with pytest.raises(UnsupportedError, match=r"adapt_model_from_string .* nk\.convert"):
        timm.models.adapt_model_from_string(model, "conv.weight:[4, 3, 3, 3]***bn.weight:[4]")


def test_our_verbs_know_what_was_built():
    model = mobilenetv3(nk.BatchNorm2d).eval()
    x = torch.randn(2, 3, 32, 32)
    frozen = nk.freeze(model, example=x)
    assert len(frozen.changed) == len(norms_of(model)) == 7
    assert frozen.parity.max_rel < 1e-5
    assert nk.convert(model, "sync", example=x).parity.max_rel < 1e-5


def test_without_timm_the_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "normkit.timm")
    monkeypatch.setitem(sys.modules, "timm.layers.create_act", None)
    with pytest.raises(MissingExtraError, match=r"normkit\.timm needs timm.*normkit\[timm\]"):
        importlib.import_module("normkit.timm")
