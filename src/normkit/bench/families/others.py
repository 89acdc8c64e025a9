"""The norms beside BatchNorm: its relatives, those within an example, and those that torch does not have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from normkit.bench.case import Case
from normkit.bench.contestants import (
    OF_MAPS,
    OTHERS,
    POINTWISE,
    RELATIVES,
    Shape,
    added,
    batch_norm,
    ghost_of_rows,
    group_norm,
    instance_norm,
    layer_norm,
    of_examples,
    other,
    relative,
    rms_norm,
)
from normkit.bench.families.batch import EVERYDAY, MODES
from normkit.bench.layer_case import LAYOUTS, Input, LayerCase, Mode

_USUAL: Shape = (32, 64, 28, 28)
_MAPS: list[Shape] = [(64, 256, 14, 14), (32, 64, 56, 56)]
_STAGES: list[Shape] = [(16, 96, 56, 56), (16, 384, 14, 14)]  # of a small ConvNeXt
_ROWS: list[Shape] = [(256, 512), (2048, 1024), (4096, 768)]
_TOKENS: Shape = (64, 197, 384)  # of a small vision transformer
_VECTORS: list[Shape] = [(4096, 384), (4096, 512), (4096, 768), (2048, 1024)]


def relatives() -> Iterator[Case]:
    """Renorm, accumulated, moving, ghost, domain and frozen norms, beside our own BatchNorm and published code."""
    for name in RELATIVES:
        for mode in MODES:
            for x in (Input(_USUAL), Input(_USUAL, "channels_last")):
                quick = x.layout == "contiguous"
                yield LayerCase("relatives", x, relative(name, 64), name, mode, quick=quick, tags=EVERYDAY)
    rows = Input((1024, 64))
    for mode in MODES:
        yield LayerCase("relatives", rows, ghost_of_rows(64), "GhostBatchNorm1d", mode, tags=EVERYDAY)


def evo() -> Iterator[Case]:
    """EvoNorm, filter response, switchable and scale norms, beside published code."""
    for name in OTHERS:
        of_vectors = name == "ScaleNorm"
        inputs = [Input(_TOKENS), Input((4096, 512))] if of_vectors else [Input(_USUAL), Input(_USUAL, "channels_last")]
        for mode in MODES:
            for x in inputs:
                contestants = other(name, x.shape[-1] if of_vectors else x.shape[1])
                yield LayerCase("evo", x, contestants, name, mode, quick=x == inputs[0], tags=EVERYDAY)


def within() -> Iterator[Case]:
    """Group, instance, layer and RMS norms, by layout, and functions of single values in their place."""
    case = partial(LayerCase, "within")
    for mode in MODES:
        for dtype in (torch.float32, torch.bfloat16):
            tokens = Input(_TOKENS, dtype=dtype)
            yield case(tokens, layer_norm(_TOKENS), "LayerNorm", mode, quick=True, tags=EVERYDAY)
        title = "LayerNorm, all parameters of its type,"
        yield case(tokens, layer_norm(_TOKENS), title, mode, parameters=tokens.dtype, tags=EVERYDAY)
        yield case(Input(_USUAL), group_norm(_USUAL), "GroupNorm(32)", mode, quick=True, tags=EVERYDAY)
    for norm, title in ((group_norm, "GroupNorm(32)"), (instance_norm, "InstanceNorm2d"), (layer_norm, "LayerNorm")):
        for layout in LAYOUTS:
            for shape in _MAPS:
                yield case(Input(shape, layout), norm(shape), title, quick=shape == _MAPS[0])
    for norm, title in ((group_norm, "GroupNorm(32)"), (rms_norm, "RMSNorm")):
        for shape in _ROWS:
            yield case(Input(shape), norm(shape), title, quick=shape == _ROWS[0])
    for dtype in (torch.float32, torch.bfloat16):
        for shape in _VECTORS:
            x, quick = Input(shape, dtype=dtype), shape == _VECTORS[0]
            yield case(x, layer_norm(shape), "LayerNorm", quick=quick, tags={"vectors": True})
    yield from _over_channels()
    yield from _within_untuned()


def _over_channels() -> Iterator[Case]:
    """Norms over the channels of each position, and functions of single values, beside published code."""
    case = partial(LayerCase, "within", tags=EVERYDAY)
    for mode in MODES:
        for name in OF_MAPS:
            for shape in _STAGES:
                for layout in LAYOUTS:
                    yield case(Input(shape, layout), other(name, shape[1]), name, mode, quick=shape == _STAGES[0])
        for name in POINTWISE:
            yield case(Input(_TOKENS), other(name, _TOKENS[-1]), name, mode, quick=True)


def _within_untuned() -> Iterator[Case]:
    """Shapes that no loop was made for."""
    case = partial(LayerCase, "within", tags={"origin": "untuned"})
    for layout in LAYOUTS:
        yield case(Input((8, 33, 17, 17), layout), group_norm((8, 33, 17, 17), groups=11), "GroupNorm(11)")
        yield case(Input((8, 17, 31, 31), layout), instance_norm((8, 17, 31, 31)), "InstanceNorm2d")
        yield case(Input((8, 33, 5, 5), layout), layer_norm((8, 33, 5, 5)), "LayerNorm")
    for shape in [(63, 129), (2, 100_003)]:
        yield case(Input(shape), layer_norm(shape), "LayerNorm")
        yield case(Input(shape), rms_norm(shape), "RMSNorm")


def calls() -> Iterator[Case]:
    """What a call can bring along: gamma and beta of each example, and what is added before the norm."""
    case = partial(LayerCase, "calls", tags=EVERYDAY)
    maps = [(Input(_USUAL), True), (Input(_USUAL, "channels_last"), False), (Input((16, 256, 7, 7)), False)]
    tokens = [(Input(_TOKENS), True), (Input((8, 16, 64)), False), (Input(_TOKENS, dtype=torch.bfloat16), False)]
    for mode in MODES:
        for kind, inputs in (("batch", maps), ("group", maps), ("layer", tokens), ("rms", tokens)):
            for x, quick in inputs:
                title = f"parameters of examples, {kind},"
                yield case(x, of_examples(x.shape, kind), title, mode, parameters=x.dtype, quick=quick)
        for kind in ("layer", "rms"):
            for x, quick in tokens:
                yield case(x, added(x.shape, kind), f"added, {kind},", mode, parameters=x.dtype, quick=quick)


def small() -> Iterator[Case]:
    """Every layer that torch has too, on (32, 64), where a call's own cost decides."""
    shape = (32, 64)
    contestants = {
        "BN + ReLU": batch_norm(shape, compiled=True),
        "BN": batch_norm(shape, None),
        "LayerNorm": layer_norm(shape),
        "RMSNorm": rms_norm(shape),
        "GroupNorm(8)": group_norm(shape, groups=8),
        "InstanceNorm1d": instance_norm(shape),
    }
    modes: tuple[Mode, ...] = ("forward", "training", "evaluation")
    for title, of_norm in contestants.items():
        for mode in modes:
            tags = {"everyday": mode != "forward"}
            yield LayerCase("small", Input(shape), of_norm, title, mode, quick=True, tags=tags)
