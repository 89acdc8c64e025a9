"""Layers whose arithmetic is their own: whitening, EvoNorm, switchable and moving-average norms."""

from __future__ import annotations

from typing import Any

import normkit as nk
from support.case import Case
from support.formulas import mixed

IMAGES = (4, 6, 6, 7)


def row(name: str, formula: Any, option: str, *sizes: int, shape=IMAGES, free=(0, 2, 3), **options: Any) -> Case:
    cls = getattr(nk, name)
    return Case(name, lambda: cls(shape[1], *sizes, **options), shape, formula, option=option, free=free)


def whitened(name: str, option: str = "", **options: Any) -> Case:
    return row(name, mixed.whitened, option, **options)


# Free sizes that leave many more values than channels: with fewer, eps alone holds the covariance up, the condition
# of whitening is 1 / eps, and no two orders of summation agree closely.
ROWS = [
    whitened("WhitenedBatchNorm2d", group_size=3, free=(2, 3)),
    whitened("WhitenedBatchNorm2d", "zca", method="zca", free=(2, 3), shape=(8, 4, 3, 5)),
    whitened("WhitenedBatchNorm2d", "zca-relu", method="zca", group_size=2, activation="relu", momentum=0.37),
    whitened("WhitenedBatchNorm2d", "cumulative", momentum=None, group_size=2, iterations=9, affine="shift"),
    whitened("WhitenedBatchNorm2d", "untracked", track_running_stats=False, group_size=1, affine=False),
    whitened("WhitenedBatchNorm1d", shape=(12, 4, 5), free=(2,)),
    whitened("WhitenedBatchNorm1d", "rows", shape=(16, 3), free=()),
    whitened("WhitenedBatchNorm1d", "rows-zca-eps", method="zca", eps=0.3, shape=(9, 4), free=(0,), affine="scale"),
    row("EvoNormB0", mixed.evo_b0, ""),
    row("EvoNormB0", mixed.evo_b0, "eps-no-affine", eps=0.03, momentum=0.4, affine=False),
    row("EvoNormB0", mixed.evo_b0, "cumulative", momentum=None, affine="scale"),
    row("EvoNormS0", mixed.evo_s0, "", 3),
    row("EvoNormS0", mixed.evo_s0, "one-group", 1, eps=0.03, affine=False),
    row("EvoNormS0", mixed.evo_s0, "single-channels", 6, affine="shift"),
    row("SwitchableNorm2d", mixed.switchable, ""),
    row("SwitchableNorm2d", mixed.switchable, "gelu", eps=0.03, activation="gelu", affine="scale"),
    row("SwitchableNorm2d", mixed.switchable, "cumulative", momentum=None, affine=False),
    row("SwitchableNorm2d", mixed.switchable, "untracked", track_running_stats=False),
    row("MovingBatchNorm2d", mixed.moving, ""),
    row("MovingBatchNorm2d", mixed.moving, "silu", activation="silu", eps=0.03, momentum=None, buffer_size=3),
    row("MovingBatchNorm2d", mixed.moving, "no-affine", affine=False, warmup=7, buffer_size=2),
    row("MovingBatchNorm2d", mixed.moving, "untracked", track_running_stats=False, affine="shift"),
]
