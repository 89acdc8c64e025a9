"""Whole networks: two of our own with the norm as a parameter, and those of others, converted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from normkit.bench.case import EAGER, OURS, Case
from normkit.bench.contestants import batch_norm
from normkit.bench.memory_case import PeakMemoryCase, SavedBytesCase
from normkit.bench.model_case import ModelCase
from normkit.bench.models import fused, inception, resnet18, separate
from normkit.bench.network_case import Network, NetworkCase

_IMAGES = (32, 3, 64, 64)
_SAVED = (32, 64, 56, 56)


def memory() -> Iterator[Case]:
    """Bytes kept for the backward, and the peak of a training step."""
    yield SavedBytesCase("memory", _SAVED, batch_norm(_SAVED))
    norms = {
        OURS: fused("leaky_relu", inplace=True),
        EAGER: separate(nn.LeakyReLU()),
        "eager-inplace-activation": separate(nn.LeakyReLU(inplace=True)),
    }
    yield PeakMemoryCase("memory", "peak Inception-like", inception, norms, _IMAGES)


def models() -> Iterator[Case]:
    """A training step with activation and residual fused."""
    # torchvision's networks, which this stands for, use the ReLU in place.
    norms = {OURS: fused("relu"), EAGER: separate(nn.ReLU(inplace=True))}
    yield ModelCase("models", "ResNet-18", resnet18, norms, _IMAGES)
    yield ModelCase("models", "Inception-like", inception, norms, _IMAGES)


def _pytorchcv(module: str, function: str, size: int) -> nn.Module:
    model: nn.Module = getattr(import_module(f"pytorchcv.models.{module}"), function)()
    features = model.get_submodule("features")
    if hasattr(features, "final_pool"):
        features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for images of 224x224, it is larger than what arrives
    return model


def _transformers(name: str, options: dict[str, Any], size: int) -> nn.Module:
    transformers = import_module("transformers")
    config = getattr(transformers, f"{name}Config")(image_size=size, num_labels=1000, **options)
    model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return model


_VIT_TINY = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
_SWIN_SMALL = {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 4}

NETWORKS = (
    *(
        Network(function, "pytorchcv", partial(_pytorchcv, module, function))
        for module, function in (
            ("resnet", "resnet18"),  # residual
            ("preresnet", "preresnet18"),
            ("seresnet", "seresnet18"),
            ("regnet", "regnetx002"),  # groups of channels
            ("densenet", "densenet121"),  # dense
            ("bninception", "bninception"),
            ("mobilenet", "mobilenet_w1"),  # depthwise
            ("mobilenetv2", "mobilenetv2_w1"),  # ReLU6
            ("mobilenetv3", "mobilenetv3_small_w1"),  # Hardswish
            ("efficientnet", "efficientnet_b0"),  # SiLU
            ("shufflenetv2", "shufflenetv2_w1"),
        )
    ),
    Network("MobileViT", "transformers", partial(_transformers, "MobileViT", {})),  # SiLU, and attention between
    Network("ViT-tiny", "transformers", partial(_transformers, "ViT", _VIT_TINY), "layer"),
    Network("Swin-small", "transformers", partial(_transformers, "Swin", _SWIN_SMALL), "layer"),
)
_SIZES, _BATCHES = (64, 128), (1, 16, 64)


def networks() -> Iterator[Case]:
    """Networks of other packages, as they are and after `nk.convert`."""
    for network in NETWORKS:
        for size in _SIZES:
            for batch in _BATCHES:
                quick = (size, batch) == (64, 16)
                yield NetworkCase("networks", network, size, batch, "training", quick)
                yield NetworkCase("networks", network, size, batch, "evaluation", quick)
