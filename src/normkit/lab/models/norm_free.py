"""Residual nets that train without norms: Fixup (Zhang et al. 2019) and scaled weights (Brock et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab.models.initial import initialize_
from normkit.lab.models.resnet import PaddedShortcut, ResNet, blocks_per_stage

Method = Literal["fixup", "scaled"]
ALPHA = 0.2  # the share of a branch in scaled nets: the paper's


class ScalarBias(nn.Module):
    """x + b, with one number b for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return x + self.bias


class FixupBlock(nn.Module):
    """relu(branch(x) + shortcut(x)): two 3x3 convolutions, a bias before each layer and activation, a multiplier."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        multiplier = nk.SkipInit()
        nn.init.ones_(multiplier.alpha)
        self.branch = nn.Sequential(
            ScalarBias(),
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            ScalarBias(),
            nn.ReLU(),
            ScalarBias(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            multiplier,
            ScalarBias(),
        )
        self.shortcut = PaddedShortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut before the activation."""
        return torch.relu(self.branch(x) + self.shortcut(x))


class ScaledBlock(nn.Module):
    """x + alpha * branch(relu(x / beta)): beta is the deviation that x has at first, and branches keep its variance."""

    def __init__(self, inputs: int, outputs: int, stride: int, beta: float) -> None:
        super().__init__()
        convolution = partial(nk.ScaledStdConv2d, activation_gain="relu")
        self.branch = nn.Sequential(
            convolution(inputs, outputs, 3, stride, padding=1),
            nn.ReLU(),
            convolution(outputs, outputs, 3, padding=1),
            nk.SkipInit(),
        )
        self.shortcut = None if inputs == outputs else convolution(inputs, outputs, 1, stride)
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch; a shortcut that changes the shape starts from what the branch starts from."""
        active = torch.relu(x / self.beta)
        return (x if self.shortcut is None else self.shortcut(active)) + ALPHA * self.branch(active)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The deviation that is divided by."""
        return f"beta={self.beta:.3g}"


def norm_free_resnet(
    depth: int,
    method: Method,
    *,
    in_channels: int = 3,
    classes: int = 10,
    width: int = 16,
    stem_stride: int = 1,
    seed: int | None = None,
) -> ResNet:
    """Return a net of 6n + 2 layers, in stages as those of `resnet`, that needs no norms.

    "fixup": branches begin as zero, and their first weights are the smaller, the deeper the net. "scaled": kernels are
    standardized in every step, branches begin as zero, and what enters them is divided by its expected deviation.
    """
    blocks = blocks_per_stage(depth)
    if method not in ("fixup", "scaled"):
        raise ArgumentError(f'method must be "fixup" or "scaled"; got {method!r}.')
    is_fixup = method == "fixup"
    stem, end = nn.Sequential(), nn.Sequential()
    if is_fixup:
        stem.append(nn.Conv2d(in_channels, width, 3, stem_stride, padding=1, bias=False))
        stem.extend([ScalarBias(), nn.ReLU()])
        end.append(ScalarBias())
    else:
        stem.append(nk.ScaledStdConv2d(in_channels, width, 3, stem_stride, padding=1))
        end.append(nn.ReLU())
    stages = nn.Sequential(*_stages(width, blocks, is_fixup))
    model = ResNet(stem, stages, end, 4 * width, classes)
    initialize_(model, seed=seed)
    if is_fixup:
        branches = [module.branch for module in model.modules() if isinstance(module, FixupBlock)]
        nk.fixup_init_(branches, classifier=model.classifier)
    return model


def _stages(width: int, blocks: int, is_fixup: bool) -> Iterator[nn.Module]:
    inputs, variance = width, 1.0
    for index, outputs in enumerate((width, 2 * width, 4 * width)):
        stage = nn.Sequential()
        for block in range(blocks):
            stride = 2 if index and not block else 1
            stage.append(
                FixupBlock(inputs, outputs, stride)
                if is_fixup
                else ScaledBlock(inputs, outputs, stride, sqrt(variance))
            )
            variance = (1.0 if inputs != outputs else variance) + ALPHA**2  # a shortcut's convolution gives one
            inputs = outputs
        yield stage
