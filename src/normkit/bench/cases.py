"""All that `normkit bench` measures, by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from normkit import layers
from normkit.bench.case import EAGER, OURS, Case
from normkit.bench.layer_case import LayerCase, Layout, Mode
from normkit.bench.memory_case import PeakMemoryCase, SavedBytesCase
from normkit.bench.model_case import ModelCase
from normkit.bench.models import fused, inception, resnet18, separate
from normkit.errors import ArgumentError

Shape = tuple[int, ...]
Contestants = dict[str, Callable[[], nn.Module]]

_MAPS: list[Shape] = [(32, 64, 56, 56), (64, 256, 14, 14), (128, 64, 32, 32), (8, 2048, 7, 7)]
_IMAGES = (32, 3, 64, 64)
_LAYOUTS: tuple[Layout, Layout] = ("contiguous", "channels_last")

# (N, C, H, W) before the ReLUs of networks that people train, at a batch that a laptop can carry.
_NETWORKS: dict[str, list[Shape]] = {
    "ResNet-50": [(16, 64, 112, 112), (16, 256, 56, 56), (16, 512, 28, 28), (16, 1024, 14, 14), (16, 2048, 7, 7)],
    "BN-Inception": [(16, 192, 56, 56), (16, 320, 28, 28), (16, 576, 14, 14), (16, 1024, 7, 7)],
    "MobileNetV2": [(16, 32, 112, 112), (16, 96, 56, 56), (16, 144, 56, 56), (16, 960, 7, 7)],
    "U-Net": [(2, 64, 256, 256), (2, 128, 128, 128), (2, 1024, 16, 16)],
}


def batch_norm_relu(shape: Shape, *, compiled: bool = False) -> Contestants:
    """BN + ReLU: ours fused, torch's one after the other, and the latter compiled.

    The backward that torch.compile makes of a real ReLU is slow. With a leaky one it is not, so that both take part.
    """
    ours, theirs = {
        2: (layers.BatchNorm1d, nn.BatchNorm1d),
        3: (layers.BatchNorm1d, nn.BatchNorm1d),
        4: (layers.BatchNorm2d, nn.BatchNorm2d),
        5: (layers.BatchNorm3d, nn.BatchNorm3d),
    }[len(shape)]
    channels = shape[1]
    contestants: Contestants = {
        OURS: lambda: ours(channels, activation="relu"),
        EAGER: lambda: nn.Sequential(theirs(channels), nn.ReLU()),
    }
    if compiled:
        contestants["compile"] = lambda: _compile(nn.Sequential(theirs(channels), nn.ReLU()))
        contestants["compile-leaky"] = lambda: _compile(nn.Sequential(theirs(channels), nn.LeakyReLU()))
    return contestants


def _compile(layer: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(layer, fullgraph=True, dynamic=False)  # type: ignore[assignment]
    return compiled


def group_norm(shape: Shape, groups: int = 32) -> Contestants:
    """GroupNorm."""
    return {OURS: partial(layers.GroupNorm, groups, shape[1]), EAGER: partial(nn.GroupNorm, groups, shape[1])}


def instance_norm(shape: Shape) -> Contestants:
    """InstanceNorm2d with gamma and beta."""
    return {
        OURS: partial(layers.InstanceNorm2d, shape[1], affine=True),
        EAGER: partial(nn.InstanceNorm2d, shape[1], affine=True),
    }


def layer_norm(shape: Shape) -> Contestants:
    """LayerNorm over everything but the examples."""
    return {OURS: partial(layers.LayerNorm, shape[1:]), EAGER: partial(nn.LayerNorm, shape[1:])}


def rms_norm(shape: Shape) -> Contestants:
    """RMSNorm over everything but the examples."""
    return {OURS: partial(layers.RMSNorm, shape[1:]), EAGER: partial(nn.RMSNorm, shape[1:])}


def _batch_norm(group: str, mode: Mode) -> Iterator[Case]:
    """The twelve cases that the kernels are judged by."""
    case = partial(LayerCase, group, mode=mode, quick=True)
    for layout in _LAYOUTS:
        for shape in [*_MAPS, (256, 512)] if layout == "contiguous" else _MAPS:
            yield case(shape, batch_norm_relu(shape, compiled=True), layout=layout)
    for layout in _LAYOUTS:
        yield case(_MAPS[0], batch_norm_relu(_MAPS[0], compiled=True), layout=layout, dtype=torch.bfloat16)
    yield case((256, 512), batch_norm_relu((256, 512), compiled=True), dtype=torch.bfloat16)


def _small() -> Iterator[Case]:
    """Where a call's own cost decides."""
    contestants = batch_norm_relu((32, 64), compiled=True)
    yield LayerCase("small", (32, 64), contestants, "forward", mode="forward", quick=True)
    yield LayerCase("small", (32, 64), contestants, "forward + backward", quick=True)


def _networks() -> Iterator[Case]:
    for network, shapes in _NETWORKS.items():
        for shape in shapes:
            yield LayerCase("networks", shape, batch_norm_relu(shape), network, quick=shape == shapes[-1])


def _family() -> Iterator[Case]:
    maps, rows = [_MAPS[1], _MAPS[0]], [(256, 512), (2048, 1024), (4096, 768)]
    case = partial(LayerCase, "family")
    for norm, title in ((group_norm, "GroupNorm(32)"), (instance_norm, "InstanceNorm2d"), (layer_norm, "LayerNorm")):
        for layout in _LAYOUTS:
            for shape in maps:
                yield case(shape, norm(shape), title, layout=layout, quick=shape == maps[0])
    for norm, title in ((group_norm, "GroupNorm(32)"), (layer_norm, "LayerNorm"), (rms_norm, "RMSNorm")):
        for shape in rows:
            yield case(shape, norm(shape), title, quick=shape == rows[0])


def _untuned() -> Iterator[Case]:
    """Shapes that no loop was made for."""
    case = partial(LayerCase, "untuned")
    batch_shapes: list[Shape] = [
        (16, 17, 31, 31),  # odd channels, odd maps
        (64, 33, 5, 5),
        (4, 24, 8, 20, 20),
        (1, 16, 512, 512),
        (64, 1, 64, 64),
        (32, 192, 7, 7),
        (64, 512, 1, 1),
        (32, 48, 200),
        (63, 129),
    ]
    for shape in batch_shapes:
        quick = shape in ((16, 17, 31, 31), (64, 512, 1, 1))
        yield case(shape, batch_norm_relu(shape), "BatchNorm + ReLU", quick=quick)
    for shape in [(16, 3, 64, 64), (16, 17, 31, 31), (32, 192, 7, 7), (4, 24, 8, 20, 20)]:
        yield case(shape, batch_norm_relu(shape), "BatchNorm + ReLU", layout="channels_last")
    for layout in _LAYOUTS:
        yield case((8, 33, 17, 17), group_norm((8, 33, 17, 17), groups=11), "GroupNorm(11)", layout=layout)
        yield case((8, 17, 31, 31), instance_norm((8, 17, 31, 31)), "InstanceNorm2d", layout=layout)
        yield case((8, 33, 5, 5), layer_norm((8, 33, 5, 5)), "LayerNorm", layout=layout)
    for shape in [(63, 129), (2, 100_003)]:
        yield case(shape, layer_norm(shape), "LayerNorm")
        yield case(shape, rms_norm(shape), "RMSNorm")


def _memory() -> Iterator[Case]:
    yield SavedBytesCase("memory", _MAPS[0], batch_norm_relu(_MAPS[0]))
    norms = {
        OURS: fused("leaky_relu", inplace=True),
        EAGER: separate(nn.LeakyReLU()),
        "eager-inplace-activation": separate(nn.LeakyReLU(inplace=True)),
    }
    yield PeakMemoryCase("memory", "peak Inception-like", inception, norms, _IMAGES)


def _models() -> Iterator[Case]:
    # torchvision's networks, which this stands for, use the ReLU in place.
    norms = {OURS: fused("relu"), EAGER: separate(nn.ReLU(inplace=True))}
    yield ModelCase("models", "ResNet-18", resnet18, norms, _IMAGES)
    yield ModelCase("models", "Inception-like", inception, norms, _IMAGES)


CASES: tuple[Case, ...] = (
    *_batch_norm("bn", "training"),
    *_batch_norm("bn-eval", "evaluation"),
    *_small(),
    *_networks(),
    *_family(),
    *_untuned(),
    *_memory(),
    *_models(),
)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


def case_id(case: Case) -> str:
    """Return the name that no other case has."""
    return f"{case.group}/{case.name}"


def choose(only: Sequence[str], *, quick: bool) -> list[Case]:
    """Return the cases of these groups and patterns, in order; without any, all, or those of the quick benchmark."""
    if not only:
        return [case for case in CASES if case.quick or not quick]
    for pattern in only:
        if not any(_matches(case, pattern) for case in CASES):
            raise ArgumentError(
                f"--only needs a group ({', '.join(GROUPS)}) or a pattern of group/case; got {pattern!r}, which no "
                "case matches. Try --only 'bn/*channels_last*'."
            )
    return [case for case in CASES if any(_matches(case, pattern) for pattern in only)]


def _matches(case: Case, pattern: str) -> bool:
    return pattern == case.group or fnmatchcase(case_id(case), pattern)
