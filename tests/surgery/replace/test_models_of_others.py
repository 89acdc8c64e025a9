"""Verbs on models that others wrote: what was meant is taken, and nothing else is touched."""

import copy
import importlib

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import activations, spec
from normkit.batches import feed, tensors_in
from normkit.surgery.replace.targets import TARGETS
from support.model_state import assert_same, everything

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

IMAGES = {"pixel_values": torch.randn(2, 3, 64, 64)}
NEEDED = {"accumulated": {"micro_batches": 2}, "domain": {"num_domains": 2}}


def hugging_face(model, config, **options):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def bit():
    return hugging_face("BitModel", "BitConfig", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4)


def convnext():
    return hugging_face("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)


def seg_res_net():
    return pytest.importorskip("monai.networks.nets").SegResNet(spatial_dims=2, in_channels=3, init_filters=8)


def detr():
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = transformers.DetrConfig(backbone_config=backbone, use_timm_backbone=False, **sizes, **heads)
    return transformers.DetrModel(config)


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return hugging_face("ViTModel", "ViTConfig", image_size=64, patch_size=16, **sizes)


def res_net():
    return hugging_face("ResNetModel", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])


def basic_unet():
    nets = pytest.importorskip("monai.networks.nets")
    return nets.BasicUNet(2, in_channels=3, out_channels=2, features=(8, 8, 16, 16, 16, 8), norm="batch")


def cifar_net():
    return pytest.importorskip("pytorchcv.models.resnet_cifar").resnet20_cifar10()


def timm_model(name):
    importlib.import_module("support.aside")
    return pytest.importorskip("timm").create_model(name, num_classes=5)


def example_of(model):
    return IMAGES if type(model).__module__.startswith("transformers") else IMAGES["pixel_values"]


def randomize_(model):
    """Away from all defaults, but not far."""
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            value.mul_(torch.rand_like(value) + 0.5) if key.endswith("var") else value.add_(
                0.05 * torch.randn_like(value)
            )
    return model


# Sync and frozen: layers with batch statistics only


@pytest.mark.parametrize("build", [bit, convnext, seg_res_net, detr, vit])
@pytest.mark.parametrize("to", ["sync", "frozen"])
def test_a_model_without_batch_statistics_is_left_as_it_is(build, to):
    """Nothing is said either: there is nothing that was asked for."""
    model = randomize_(build()).eval()
    before, kinds = everything(model), [type(layer) for layer in model.modules()]
    done = nk.convert(model, to, example_of(model), inplace=True)
    if build is detr and to == "frozen":  # its frozen norms become ours, and stay frozen
        assert done.parity.max_rel < 1e-5
        assert {type(model.get_submodule(change.layer)) for change in done.changed} == {nk.FrozenBatchNorm2d}
        return
    assert done.changed == []
    assert done.skipped
    assert done.parity.max_abs == 0
    assert [type(layer) for layer in model.modules()] == kinds
    assert_same(before, everything(model))


def test_frozen_norms_of_detr_stay_frozen():
    model = randomize_(detr()).train()
    frozen = {n: m for n, m in model.named_modules() if type(m).__name__ == "DetrFrozenBatchNorm2d"}
    state = {name: copy.deepcopy(layer.state_dict()) for name, layer in frozen.items()}
    assert len(frozen) > 3
    for verb in (nk.freeze, nk.unfreeze):
        done = verb(model, inplace=True)
        assert done.changed == []
        assert {skipped.layer for skipped in done.skipped} >= set(frozen)
    nk.convert(model, "sync", inplace=True)
    feed(model, IMAGES)
    for name, layer in frozen.items():
        assert all(torch.equal(value, state[name][key]) for key, value in layer.state_dict().items())
    thawed = nk.unfreeze(model, example=IMAGES, only="backbone")
    assert {change.layer for change in thawed.changed} == set(frozen)
    assert thawed.parity.max_rel < 1e-5


def test_they_are_taken_when_they_are_named():
    model = randomize_(seg_res_net()).eval()
    name = next(name for name, layer in model.named_modules() if isinstance(layer, nn.GroupNorm))
    done = nk.convert(model, "sync", only=name)
    assert [change.layer for change in done.changed] == [name]


# Freeze, recalibrate and no_updates, whatever activation follows

LITE = ["mobilenetv2_035", "mobilenetv3_small_050", "efficientnet_lite0"]
any_activation = pytest.mark.skipif(
    not (hasattr(activations, "activation_of") or hasattr(spec, "activation_of")),
    reason="layers carry only the activations that their loops fuse",
)


@any_activation
@pytest.mark.parametrize("name", LITE)
def test_freeze_takes_every_norm(name):
    model = randomize_(timm_model(name))
    norms = [n for n, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    done = nk.freeze(model, example=IMAGES["pixel_values"])
    assert [change.layer for change in done.changed] == norms
    assert done.parity.max_rel < 1e-4
    before = {key: value.clone() for key, value in done.model.state_dict().items() if "running" in key}
    done.model.train()(IMAGES["pixel_values"])
    assert all(torch.equal(done.model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", LITE)
def test_recalibrate_and_no_updates_take_every_norm(name):
    model, x = randomize_(timm_model(name)), torch.randn(4, 3, 64, 64)
    norms = [n for n, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert [change.layer for change in nk.recalibrate(model, [x, x + 1]).changed] == norms
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with nk.no_updates(model):
        model.train()(x)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


# Every target


@pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")  # of norms that a target cannot take the place of
@pytest.mark.parametrize("build", [res_net, basic_unet, cifar_net, vit])
@pytest.mark.parametrize("to", TARGETS)
def test_every_target_trains_in_models_of_others(build, to):
    model = randomize_(build()).eval()
    example = torch.randn(2, 3, 32, 32) if build is cifar_net else example_of(model)
    norms = [name for name, layer in model.named_modules() if nk.describe(layer) is not None]
    done = nk.convert(model, to, example, **NEEDED.get(to, {}))
    assert len(done.changed) + len(done.skipped) == len(norms)
    of_values = ("dyt", "derf")  # which have no axis
    takes = to in ("layer", "rms", "scale", *of_values) if build is vit else to not in ("rms", "scale")
    assert len(done.changed) == (len(norms) if takes else 0), str(done)
    alike = ("batch", "sync", "frozen", "renorm", "ghost", "shuffled", "accumulated", "split")
    if takes and to in (*alike, "domain", "whitened", "position"):
        assert build is vit or done.parity is None or done.parity.max_rel < 1e-3
    for layer in done.model.modules():
        if isinstance(layer, nk.DomainBatchNorm2d):
            layer.domain = 1
    done.model.train()
    outputs = [t for t in tensors_in(feed(done.model, example)) if t.requires_grad]
    sum(t.float().square().mean() for t in outputs).backward()
    learning = [p for name in norms for p in done.model.get_submodule(name).parameters()]
    assert learning or to == "frozen"
    assert all(p.grad is None or p.grad.isfinite().all() for p in learning)
    assert any(p.grad is not None for p in learning) or to == "frozen"
    assert done.undo() is model
