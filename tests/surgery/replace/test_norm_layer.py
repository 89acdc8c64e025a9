"""Factories of norm layers by name, on their own and in the models of torchvision and timm."""

import copy
import importlib
import pickle
import sys
from functools import partial

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.replace.targets import TARGETS

NEEDED = {"accumulated": {"micro_batches": 2}, "domain": {"num_domains": 2}, "position": {"height": 4, "width": 3}}
LAST = ("rms", "scale")  # kinds for inputs with the channels last
POINTWISE = ("dyt", "derf")  # kinds without an eps
INPUTS = {1: (6, 12, 7), 2: (6, 12, 4, 3), 3: (6, 12, 4, 3, 2)}


def factory(kind, **options):
    return nk.norm_layer(kind, **({"dims": 1} if kind in LAST else {}), **NEEDED.get(kind, {}), **options)


@pytest.mark.parametrize("kind", TARGETS)
def test_every_kind(kind):
    make = factory(kind)
    layer = make(12)
    assert nk.describe(layer).kind in (kind, "batch", "group")  # sync, frozen, ghost and position are batch norms
    assert type(layer).__module__.startswith("normkit.layers")
    if kind == "domain":
        layer.domain = 1
    x = torch.randn(5, 12) if kind in LAST else torch.randn(INPUTS[2])
    assert layer(x).isfinite().all()
    assert make(12) is not layer


@pytest.mark.parametrize("kind", TARGETS)
def test_copies_pickles_and_what_is_printed(kind):
    (name, value), *_ = ({"alpha_init_value": 0.7} if kind in POINTWISE else {"eps": 0.01}).items()
    make = factory(kind, **{name: value})
    for other in (copy.deepcopy(make), pickle.loads(pickle.dumps(make)), eval(repr(make), {"nk": nk})):
        assert repr(other) == repr(make)
        assert repr(other(12)) == repr(make(12))
        assert getattr(other(12), name) == value


@pytest.mark.parametrize("kind", TARGETS)
def test_what_libraries_pass(kind):
    make = factory(kind)
    layer = make(12, eps=0.02, momentum=0.3, affine=True, device="meta", dtype=torch.float64)
    assert {t.device.type for t in layer.parameters()} <= {"meta"}
    assert {t.dtype for t in layer.state_dict().values() if t.is_floating_point()} == {torch.float64}
    assert getattr(layer, "eps", 0.02) == 0.02  # likewise
    assert getattr(layer, "momentum", 0.3) in (0.3, 0.1)  # what has none of its own is not asked
    rebound = partial(make.func, **make.keywords, eps=0.5)  # as timm does it
    assert getattr(rebound(12), "eps", 0.5) == 0.5


def test_options_of_the_layers():
    assert nk.norm_layer("ghost", chunk_size=2)(8).chunk_size == 2
    assert nk.norm_layer("batch", affine="scale", activation="relu")(8).activation == "relu"
    assert nk.norm_layer("batch", affine=False)(8, affine=True).weight is not None
    assert nk.norm_layer("layer", dims=1, affine=False)(8).weight is None
    assert nk.norm_layer("layer", dims=1)((3, 8)).normalized_shape == (3, 8)
    assert nk.norm_layer("batch")(8, momentum=None).momentum is None


@pytest.mark.parametrize(
    ("options", "channels", "groups"), [({}, 64, 32), ({"groups": 32}, 48, 24), ({"groups": 4}, 10, 2), ({}, 7, 1)]
)
def test_groups_are_fitted_as_convert_fits_them(options, channels, groups):
    made = nk.norm_layer("group", **options)(channels)
    converted = nk.convert(nn.BatchNorm2d(channels), "group", **options).model
    assert made.num_groups == converted.num_groups == groups
    assert nk.norm_layer("evo-s0", **options)(channels).groups == groups
    assert nk.norm_layer("whitened", group_size=5)(12).group_size == 4


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dimensions(dims):
    x = torch.randn(INPUTS[dims])
    for kind in ("batch", "sync", "frozen", "renorm", "group", "instance"):
        assert nk.norm_layer(kind, dims=dims)(12)(x).isfinite().all()
    assert type(nk.norm_layer("layer", dims=dims)(12)) is (nk.LayerNorm if dims == 1 else nk.GroupNorm)
    assert type(nk.norm_layer("batch", dims=dims)(12)).__name__ == f"BatchNorm{dims}d"
    for kind in POINTWISE:
        assert nk.norm_layer(kind, dims=dims)(12).channels_last is (dims == 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nk.norm_layer("grup"), r"kind must be one of .*; got 'grup'. Did you mean \"group\"\?"),
        (lambda: nk.norm_layer(nn.BatchNorm2d), "kind must be one of"),
        (
            lambda: nk.norm_layer("group", gruops=4),
            r'norm_layer\("group"\) takes .*; got gruops=4. Did you mean "groups"',
        ),
        (lambda: nk.norm_layer("group", groups=0), "groups must be a number from 1 on"),
        (lambda: nk.norm_layer("group", momentum=0.1), "takes the options .*; got momentum"),
        (lambda: nk.norm_layer("layer", groups=2), "takes the options .*; got groups=2"),
        (lambda: nk.norm_layer("batch", eps=-1.0), "eps must be positive"),
        (lambda: nk.norm_layer("batch", dims=4), "dims must be 1, 2 or 3, .*; got 4"),
        (lambda: nk.norm_layer("ghost", dims=3), 'there is no "ghost" norm for dims=3, only for 1, 2'),
        (lambda: nk.norm_layer("dyt", eps=1e-5), "takes the options .*; got eps"),
        (lambda: nk.norm_layer("derf", alpha_init_value="0.5"), "alpha_init_value must be a finite number; got '0.5'"),
        (lambda: nk.norm_layer("rms"), "take the last dimension for the channels; got dims=2. Pass dims=1"),
        (lambda: nk.norm_layer("accumulated"), "needs micro_batches="),
        (lambda: nk.norm_layer("domain"), "needs num_domains="),
        (lambda: nk.norm_layer("position", height=3), "needs width=, the size of its maps"),
        (lambda: nk.norm_layer("filter-response", affine=False), "takes the options"),
        (lambda: nk.norm_layer("filter-response")(8, affine=False), "always has its parameters; got affine=False"),
        (lambda: nk.norm_layer("group")(0), "needs a number of channels, 1 or more; got 0"),
        (lambda: nk.norm_layer("batch")("8"), "needs a number of channels, 1 or more; got '8'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(nk.ArgumentError, match=message):
        call()


# In other libraries


def from_aside(name):
    importlib.import_module("support.aside")
    return pytest.importorskip(name)


def trains(model, x):
    model.train()
    loss = model(x).square().mean()
    loss.backward()
    norms = [layer for layer in model.modules() if nk.describe(layer) is not None]
    assert norms
    assert all(type(layer).__module__.startswith("normkit") for layer in norms)
    assert all(p.grad is not None for layer in norms for p in layer.parameters())
    copy.deepcopy(model)
    pickle.dumps(model)


KINDS = {kind: NEEDED.get(kind, {}) for kind in TARGETS if kind not in (*LAST, "position", "domain", "frozen", "sync")}


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_torchvision(kind):
    models = from_aside("torchvision").models
    x = torch.randn(4, 3, 64, 64)
    trains(models.resnet18(norm_layer=nk.norm_layer(kind, **KINDS[kind]), num_classes=5), x)


@pytest.mark.deep
def test_more_of_torchvision():
    models = from_aside("torchvision").models
    x = torch.randn(2, 3, 64, 64)
    for build in (models.mobilenet_v2, models.mobilenet_v3_small, models.efficientnet_b0, models.regnet_y_400mf):
        trains(build(norm_layer=nk.norm_layer("group", groups=8), num_classes=5), x)
    transformer = models.VisionTransformer(
        64, 16, 1, 2, 16, 32, num_classes=5, norm_layer=nk.norm_layer("rms", dims=1, eps=1e-6)
    )
    trains(transformer, x)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_timm(kind):
    timm = from_aside("timm")
    x = torch.randn(2, 3, 64, 64)
    make = nk.norm_layer(kind, **KINDS[kind])
    trains(timm.create_model("resnet10t", norm_layer=make, num_classes=5), x)
    if kind in ("batch", "group", "layer"):
        small = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16), "conv_mlp": True, "num_classes": 5}
        model = timm.create_model("convnext_atto", norm_layer=make, norm_eps=1e-3, **small)
        trains(model, torch.randn(4, 3, 64, 64))
        assert {layer.eps for layer in model.modules() if nk.describe(layer) is not None} <= {1e-3, 1e-5}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_timm_does_not_lose_an_activation_in_silence():
    """Where it wants norm and activation in one, a factory of norms alone is refused, or normkit.timm adds it."""
    timm = from_aside("timm")

    def build():
        return timm.create_model("efficientnet_lite0", norm_layer=nk.norm_layer("group"), num_classes=5)

    if "normkit.timm" in sys.modules:  # of another test: once imported, it stays
        assert any(layer.activation is not None for layer in build().modules() if isinstance(layer, nk.GroupNorm))
    else:
        with pytest.raises(AssertionError, match="No equivalent norm_act layer for normofkind"):
            build()
