"""Networks that others wrote, at random and trained for a few steps, so that no statistic and no gamma is a default."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normkit.batches import feed, tensors_in


@dataclass(frozen=True)
class Architecture:
    """A network: who has it, how it is built, and the shape of what it takes."""

    name: str
    home: str  # the module that it is in
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    key: str | None = None  # the keyword argument that it wants its input as
    quick: bool = False

    @property
    def package(self) -> str:
        return self.home.partition(".")[0]

    def example(self, seed: int = 0, batch: int = 2) -> Any:
        noise = torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))
        return noise if self.key is None else {self.key: noise}

    def trained(self, steps: int = 3, rate: float = 1e-3) -> nn.Module:
        """The network in evaluation, after some steps on noise, with every gamma and beta moved besides.

        Statistics are averaged over the steps: three steps of a moving average would leave them near their defaults,
        and activations so far from them that deep networks amplify any rounding.
        """
        torch.manual_seed(0)
        model = self.build().train()
        norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(steps):
            optimizer.zero_grad()
            outputs = [t for t in tensors_in(feed(model, self.example(seed=step))) if t.requires_grad]
            sum(t.float().square().mean() for t in outputs).backward()
            optimizer.step()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            if norm.affine:
                with torch.no_grad():
                    norm.weight.mul_(torch.rand_like(norm.weight) + 0.5)
                    norm.bias.add_(0.2 * torch.randn_like(norm.bias))
        return model.eval()


def wide(batch: Any) -> Any:
    """The same in float64."""
    return {key: wide(value) for key, value in batch.items()} if isinstance(batch, dict) else batch.double()


def _cv(module: str, function: str | None = None, shape=(3, 224, 224), quick=False, **options: Any) -> Architecture:
    function, home = function or module, f"pytorchcv.models.{module}"

    def build() -> nn.Module:
        return getattr(importlib.import_module(home), function)(**options)

    return Architecture(function, home, build, shape, quick=quick)


def _monai(name: str, shape: tuple[int, ...], quick=False, **options: Any) -> Architecture:
    def build() -> nn.Module:
        return getattr(importlib.import_module("monai.networks.nets"), name)(**options)

    return Architecture(name, "monai.networks.nets", build, shape, quick=quick)


def _hf(name: str, config: str, shape=(3, 64, 64), quick=False, key="pixel_values", **options: Any) -> Architecture:
    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return Architecture(name, "transformers", build, shape, key=key, quick=quick)


CIFAR = (3, 32, 32)

ARCHITECTURES = [
    _cv("resnet_cifar", "resnet20_cifar10", CIFAR, quick=True),
    _cv("preresnet_cifar", "preresnet20_cifar10", CIFAR, quick=True),
    _cv("resnext_cifar", "resnext29_32x4d_cifar10", CIFAR),
    _cv("seresnet_cifar", "seresnet20_cifar10", CIFAR),
    _cv("sepreresnet_cifar", "sepreresnet20_cifar10", CIFAR),
    _cv("densenet_cifar", "densenet40_k12_cifar10", CIFAR),
    _cv("pyramidnet_cifar", "pyramidnet110_a48_cifar10", CIFAR),
    _cv("wrn_cifar", "wrn16_10_cifar10", CIFAR),
    _cv("diaresnet_cifar", "diaresnet20_cifar10", CIFAR),
    _cv("rir_cifar", "rir_cifar10", CIFAR),
    _cv("ror_cifar", "ror3_56_cifar10", CIFAR),
    _cv("shakeshakeresnet_cifar", "shakeshakeresnet20_2x16d_cifar10", CIFAR, quick=True),
    _cv("fractalnet_cifar", "fractalnet_cifar10", CIFAR),
    _cv("xdensenet_cifar", "xdensenet40_2_k24_bc_cifar10", CIFAR),
    _cv("wrn1bit_cifar", "wrn20_10_1bit_cifar10", CIFAR),
    _cv("resnet", "resnet18"),
    _cv("resnet", "resnetbc26b"),
    _cv("vgg", "bn_vgg11b"),
    _cv("bninception"),
    _cv("preresnet", "preresnet18"),
    _cv("resnetd", "resnetd50b"),
    _cv("seresnet", "seresnet18"),
    _cv("ibnresnet", "ibn_resnet50"),
    _cv("dla", "dla34"),
    _cv("drn", "drnd22"),
    _cv("darknet53"),
    _cv("densenet", "densenet121"),
    _cv("mobilenet", "mobilenet_wd4"),
    _cv("mobilenetv2", "mobilenetv2_wd4"),
    _cv("mobilenetv3", "mobilenetv3_small_w1"),
    _cv("mnasnet", "mnasnet_small"),
    _cv("efficientnet", "efficientnet_b0"),
    _cv("shufflenet", "shufflenet_g3_wd4"),
    _cv("shufflenetv2", "shufflenetv2_wd2"),
    _cv("menet", "menet108_8x1_g3"),
    _cv("squeezenext", "sqnxt23_w1"),
    _cv("ghostnet"),
    _cv("mixnet", "mixnet_s"),
    _cv("igcv3", "igcv3_wd4"),
    _cv("xception", shape=(3, 299, 299)),
    _cv("inceptionv3", shape=(3, 299, 299)),
    _cv("peleenet"),
    _cv("vovnet", "vovnet27s"),
    _cv("hardnet", "hardnet39ds"),
    _cv("hrnet", "hrnet_w18_small_v1"),
    _cv("selecsls", "selecsls42"),
    _cv("octresnet", "octresnet10_ad2"),
    _cv("fishnet", "fishnet99"),
    _cv("regnet", "regnetx002"),
    _cv("sknet", "sknet50"),
    _cv("bagnet", "bagnet9"),
    _cv("dpn", "dpn68"),
    _cv("erfnet", "erfnet_cityscapes", (3, 64, 64)),
    _cv("enet", "enet_cityscapes", (3, 64, 64)),
    _cv("unet", "unet_cityscapes", (3, 64, 64)),
    _cv("segnet", "segnet_cityscapes", (3, 64, 64)),
    _monai(
        "BasicUNet",
        (1, 32, 32),
        spatial_dims=2,
        out_channels=2,
        features=(8, 8, 16, 32, 32, 8),
        norm="batch",
    ),
    _monai(
        "UNet",
        (1, 16, 16, 16),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
        norm="batch",
    ),
    _monai("VNet", (1, 32, 32, 32), spatial_dims=3),
    _monai("SegResNet", (1, 32, 32), spatial_dims=2, norm="batch", init_filters=8),
    _monai("DenseNet121", (1, 64, 64), spatial_dims=2, in_channels=1, out_channels=3),
    _monai(
        "DynUNet",
        (1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        norm_name="batch",
        filters=(8, 16, 32),
    ),
    _hf(
        "ResNetForImageClassification",
        "ResNetConfig",
        quick=True,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
    ),
    _hf(
        "RegNetModel",
        "RegNetConfig",
        quick=True,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        groups_width=8,
    ),
    _hf("MobileNetV1Model", "MobileNetV1Config", depth_multiplier=0.25),
    _hf("MobileNetV2Model", "MobileNetV2Config", depth_multiplier=0.35),
    _hf("EfficientNetModel", "EfficientNetConfig", width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640),
    _hf(
        "LevitModel",
        "LevitConfig",
        shape=(3, 64, 64),
        quick=True,
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _hf(
        "MobileViTModel",
        "MobileViTConfig",
        shape=(3, 64, 64),
        image_size=64,
        hidden_sizes=[24, 32, 40],
        neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64],
    ),
    _hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=32,
    ),
    _hf(
        "PatchTSTModel",
        "PatchTSTConfig",
        shape=(64, 3),
        quick=True,
        key="past_values",
        num_input_channels=3,
        context_length=64,
        d_model=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        norm_type="batchnorm",
    ),
]

# Networks whose norms are, for the most part, of an example: group, instance and layer norms.
OF_OTHER_NORMS = [
    _monai("BasicUNetPlusPlus", (1, 32, 32), spatial_dims=2, features=(8, 8, 16, 32, 32, 8)),
    _monai("MedNeXt", (1, 32, 32), spatial_dims=2, init_filters=8, kernel_size=3),
    _monai("SegResNetDS", (1, 32, 32), spatial_dims=2, init_filters=8, norm=("instance", {"affine": True})),
    _hf("BitModel", "BitConfig", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4),
    _hf("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1]),
    _hf("CvtModel", "CvtConfig", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    _hf("PoolFormerModel", "PoolFormerConfig", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1]),
    _hf("SwinModel", "SwinConfig", image_size=64, window_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4]),
    _hf(
        "ViTModel",
        "ViTConfig",
        image_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    _hf(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        shape=(1600,),
        key="input_values",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16, 16, 16, 16),
        conv_stride=(5, 2, 2, 2),
        conv_kernel=(10, 3, 3, 3),
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
    ),
]
