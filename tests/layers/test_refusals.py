"""Tools that would change a layer of ours in silence, or cannot take it: the same function, or an error."""

import copy
import importlib
import inspect
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.ao.quantization import fuse_modules, fuse_modules_qat
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval

import normkit as nk
from normkit.layers.refusals import OwnFunction
from support.cases import CASES, randomize_
from support.depth import first_of_each
from support.foreign_norms import BatchNormAct2d
from support.model_state import assert_same, everything
from support.refusal import refused

torchs_converter = nn.SyncBatchNorm.convert_sync_batchnorm


def timms_converter(model):
    """timm's own, which calls itself by its name, also where another test has imported normkit.timm."""
    importlib.import_module("support.aside")  # where timm is
    own = inspect.unwrap(importlib.import_module("timm.layers").convert_sync_batchnorm)
    with mock.patch.dict(own.__globals__, {own.__name__: own}):
        return own(model)


def lightnings_converter(model):
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

    return TorchSyncBatchNorm().apply(model)


CONVERTERS = [
    torchs_converter,
    pytest.param(timms_converter, marks=pytest.mark.deep),
    pytest.param(lightnings_converter, marks=pytest.mark.deep),
]


def net(norm):
    return randomize_(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 1))).double()


MORE = {
    "activation": lambda: nk.BatchNorm2d(4, activation="relu"),
    "function": lambda: nk.BatchNorm2d(4, activation=torch.sin),
    "module": lambda: nk.BatchNorm2d(4, activation=nn.PReLU()),
    "synced": lambda: nk.SyncBatchNorm(4, activation="silu"),
    "nonfinite": lambda: nk.BatchNorm2d(4, nonfinite="skip-update"),
    "renorm": lambda: nk.BatchRenorm2d(4),
    "ghost": lambda: nk.GhostBatchNorm2d(4),
    "domain": lambda: nk.DomainBatchNorm2d(4, 2),
    "accumulated": lambda: nk.AccumulatedBatchNorm2d(4, micro_batches=2),
    "position": lambda: nk.PositionBatchNorm2d(4, 3, 3),
}


@pytest.mark.parametrize("convert", CONVERTERS)
@pytest.mark.parametrize("make", MORE.values(), ids=MORE)
def test_sync_converters_are_refused_what_they_would_drop(make, convert):
    model = net(make())
    before = everything(model)
    words = f"{type(model[1]).__name__}(4", " has ", "SyncBatchNorm", 'nk.convert(model, "sync")'
    refused(lambda: convert(model), *words, error=RuntimeError)
    assert type(model[1]) is type(make())
    assert_same(before, everything(model))


@pytest.mark.parametrize("convert", CONVERTERS)
@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
@pytest.mark.parametrize("kind", [nk.BatchNorm1d, nk.BatchNorm2d, nk.BatchNorm3d])
def test_sync_converters_take_what_torchs_class_can_do(kind, affine, convert):
    layer = randomize_(kind(4, affine=affine)).double().eval()
    x = torch.randn(3, 4, *[5] * (int(kind.__name__[-2])), dtype=torch.float64)
    expected = layer(x)
    converted = convert(nn.Sequential(layer))
    assert type(converted[0]) is nn.SyncBatchNorm
    torch.testing.assert_close(converted(x), expected, rtol=1e-12, atol=1e-12)


def test_the_other_ways_out_work():
    model = net(nk.BatchNorm2d(4, activation="relu")).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    synced = nk.convert(model, "sync", x)
    assert synced.parity.max_rel < 1e-12
    plain = nk.convert(model, classes="torch").model
    torch.testing.assert_close(torchs_converter(plain)(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", MORE.values(), ids=MORE)
def test_nobody_else_sees_the_child_that_refuses(make):
    model = net(make())
    assert not [m for m in model.modules() if isinstance(m, OwnFunction)]
    assert not [name for name, _ in model.named_modules() if "own_function" in name]
    assert "own_function" not in repr(model)
    assert not [key for key in model.state_dict() if "own_function" in key]
    copy.deepcopy(model).float().eval().train().apply(lambda m: None).requires_grad_(False).to_empty(device="meta")


def test_other_modules_are_registered_as_ever():
    """The hook that refuses is called for every child in the process."""
    model = nn.Sequential(nn.Linear(2, 3))
    model.add_module("act", nn.ReLU())
    model.norm = BatchNormAct2d(3, nn.ReLU())
    model.norm = None
    assert [name for name, _ in model.named_children()] == ["0", "act"]


# ---- fusion


def conv_nets():
    for affine in (True, False, "scale", "shift"):
        for activation in (None, "relu", "hardswish"):
            yield pytest.param(affine, activation, id=f"{affine}-{activation}")


@pytest.mark.parametrize(("affine", "activation"), list(conv_nets()))
def test_fx_fusion_keeps_the_function(affine, activation):
    """It compares exact types: ours it leaves alone, and torch's classes that ours turned into it fuses."""
    model = net(nk.BatchNorm2d(4, affine=affine, activation=activation)).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(fuse(model)(x), model(x))
    fused = fuse(nk.convert(model, classes="torch", example=x).model)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-11, atol=1e-11)
    assert not [m for m in fused.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize("fusion", [fuse_modules, fuse_modules_qat])
@pytest.mark.parametrize("kind", [nk.BatchNorm2d, nk.GhostBatchNorm2d])
def test_quantization_fusion_says_what_to_do(kind, fusion):
    model = net(kind(4)).train(fusion is fuse_modules_qat)
    words = f"got a {kind.__name__} of normkit", 'nk.convert(model, classes="torch")'
    refused(lambda: fusion(model, [["0", "1"]]), *words, error=RuntimeError)
    refused(lambda: fusion(model, ["0", "1"], inplace=True), *words, error=RuntimeError)
    assert type(model[1]) is kind


@pytest.mark.deep
def test_quantization_fusion_says_so_whatever_was_imported_first():
    code = """
import torch
from torch import nn
import normkit as nk
model = nn.Sequential(nn.Conv2d(3, 4, 3), nk.BatchNorm2d(4)).eval()
from torch.ao.quantization import fuse_modules
try:
    fuse_modules(model, [["0", "1"]])
except nk.UnsupportedError:
    print("refused")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "refused\n"


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_quantization_fuses_what_ours_turn_into(activation):
    model = net(nk.BatchNorm2d(4, activation=activation)).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torchs = nk.convert(model, classes="torch").model
    names = {None: ["0", "1"], "relu": ["0", "1.0", "1.1"], "silu": ["0", "1.0"]}[activation]
    fused = fuse_modules(torchs, [names])
    torch.testing.assert_close(fused(x), model(x), rtol=1e-11, atol=1e-11)
    trained = fuse_modules_qat(torchs.train(), [names])
    torch.testing.assert_close(trained.eval()(x), model(x), rtol=1e-11, atol=1e-11)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantization_aware_training_takes_what_ours_turn_into():
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = net(nk.BatchNorm2d(4, activation="relu")).float().train()
    prepared = fuse_modules_qat(nk.convert(model, classes="torch").model, [["0", "1.0", "1.1"]])
    prepared.qconfig = get_default_qat_qconfig("x86")
    prepared = prepare_qat(prepared)
    x = torch.randn(8, 3, 8, 8)
    prepared(x).sum().backward()
    assert torch.isfinite(prepared.eval()(x)).all()


def test_a_fusion_that_reads_weights_alone_cannot_be_refused():
    """As the documentation says: it never sees the layer, only its tensors and eps."""
    model = net(nk.BatchNorm2d(4, activation="relu")).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    fused = fuse_conv_bn_eval(model[0], model[1])(x)
    torch.testing.assert_close(fused.relu(), model[:2](x), rtol=1e-11, atol=1e-11)


# ---- torch.jit.script


@pytest.mark.parametrize("case", first_of_each(CASES, lambda case: case.name), ids=str)
def test_script_is_refused_with_a_way_out(case):
    layer = case.layer()
    model = nn.Sequential(nn.Identity(), layer)
    words = f"torch.jit.script cannot compile {case.name}", "torch.jit.trace", 'nk.convert(model, classes="torch")'
    refused(lambda: torch.jit.script(layer), *words, error=RuntimeError)
    refused(lambda: torch.jit.script(model), *words, error=RuntimeError)
    assert model[1] is layer


def test_what_ours_turn_into_can_be_scripted():
    model = net(nk.BatchNorm2d(4, activation="relu")).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    scripted = torch.jit.script(nk.convert(model, classes="torch").model)
    torch.testing.assert_close(scripted(x), model(x), rtol=1e-12, atol=1e-12)
