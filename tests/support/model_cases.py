"""Every model of the lab, small enough for tests, and the norms that it is built with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import normkit as nk
from normkit.lab.models import MODELS, dcgan


class ModelCase(NamedTuple):
    name: str
    build: Callable[..., nn.Module]  # called with a norm
    shape: tuple[int, ...]  # of an input, without the batch
    outputs: tuple[int, ...] = (10,)
    norms: str = "2d"

    def __str__(self):
        return self.name

    def input(self, batch=3):
        return torch.randn(batch, *self.shape)


NORMS = {
    "2d": {
        "batch": nk.BatchNorm2d,
        "torch batch": nn.BatchNorm2d,
        "group": partial(nk.GroupNorm, 2),
        "layer": partial(nk.GroupNorm, 1),
        "none": None,
    },
    "1d": {"batch": nk.BatchNorm1d, "torch batch": nn.BatchNorm1d, "layer": nk.LayerNorm, "none": None},
}


def _resnet(norm, **options):
    return MODELS["resnet"](8, norm, width=4, **options)


def _small(name, **options):
    return partial(MODELS[name], classes=10, **options)


CASES = [
    ModelCase("sigmoid-mlp", _small("sigmoid-mlp", inputs=36, hidden=(8, 6, 4)), (1, 6, 6), norms="1d"),
    ModelCase("bn-inception", _small("bn-inception"), (3, 64, 64)),
    ModelCase("small-inception", _small("small-inception", modules=4), (1, 28, 28)),
    ModelCase("small-inception sigmoid", _small("small-inception", modules=4, activation="sigmoid"), (1, 28, 28)),
    ModelCase("small-inception recipe", _small("small-inception", in_channels=3, lrn=True, stem_stride=1), (3, 32, 32)),
    ModelCase("resnet v1", _resnet, (3, 32, 32)),
    ModelCase("resnet preact", partial(_resnet, block="preact"), (3, 32, 32)),
    ModelCase("resnet plain", partial(_resnet, block="plain", in_channels=1), (1, 28, 28)),
    ModelCase("resnet18", _small("resnet18", width=8), (3, 64, 64)),
    ModelCase("vgg", _small("vgg", width=4), (3, 32, 32)),
    ModelCase("vgg 28", _small("vgg", width=4, in_channels=1, depth=16), (1, 28, 28)),
    ModelCase("dcgan generator", lambda norm: dcgan(norm, latent=5, width=4)[0], (5,), (1, 28, 28)),
    ModelCase("dcgan discriminator", lambda norm: dcgan(norm, size=32, channels=3, width=4)[1], (3, 32, 32), ()),
]
PAIRS = [(case, norm) for case in CASES for norm in NORMS[case.norms]]
IDS = [f"{case}-{norm}" for case, norm in PAIRS]
LARGE = "bn-inception"


def build(case, norm="batch"):
    return case.build(NORMS[case.norms][norm])


def randomize_(model):
    """Move every parameter and statistic off its default, little enough that a deep net still computes."""
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if not t.is_floating_point():
                t.random_(1, 7)
            elif name.endswith("running_var"):
                t.uniform_(0.5, 2.0)
            else:
                t.add_(torch.randn_like(t) * (0.1 if t.dim() == 1 else 0.02))
    return model
