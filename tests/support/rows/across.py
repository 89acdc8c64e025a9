"""Statistics across examples."""

from __future__ import annotations

from typing import Any

from torch import nn

import normkit as nk
from support.case import Case
from support.formulas import across


def batch_row(cls_name: str, shape: tuple[int, ...], option: str = "", *, twin: Any = None, **options: Any) -> Case:
    ours, theirs = getattr(nk, cls_name), getattr(nn, cls_name)
    if twin is None and "activation" not in options and options.get("affine", True) in (True, False):
        twin = lambda: theirs(shape[1], **options)  # noqa: E731
    return Case(
        cls_name,
        lambda: ours(shape[1], **options),
        shape,
        across.batch_norm,
        twin or None,
        option,
        free=(0, *range(2, len(shape))),
    )


def position_row(option: str = "", **options: Any) -> Case:
    return Case(
        "PositionBatchNorm2d",
        lambda: nk.PositionBatchNorm2d(3, 4, 5, **options),
        (6, 3, 4, 5),
        across.batch_norm,
        option=option,
        free=(0,),
    )


def scale_only() -> nn.Module:
    twin = nn.BatchNorm2d(5)
    twin.bias = None  # what bias=False does; torch 2.10 has no such argument
    return twin


ROWS = [
    batch_row("BatchNorm1d", (8, 5), "rows"),
    batch_row("BatchNorm1d", (6, 5, 7)),
    batch_row("BatchNorm2d", (4, 5, 6, 7)),
    batch_row("BatchNorm3d", (3, 4, 3, 4, 5)),
    position_row(),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "eps", eps=0.03, momentum=0.37),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "cumulative", momentum=None),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "untracked", track_running_stats=False),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "no-affine", affine=False),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "scale", affine="scale", twin=scale_only),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "shift", affine="shift"),
    batch_row("BatchNorm1d", (6, 5, 7), "relu", activation="relu"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "leaky_relu", activation="leaky_relu"),
    batch_row("BatchNorm3d", (3, 4, 3, 4, 5), "silu", activation="silu"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "gelu", activation="gelu"),
    batch_row("BatchNorm1d", (8, 5), "rows-sigmoid", activation="sigmoid"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "tanh-scale", activation="tanh", affine="scale"),
    position_row("relu-shift", activation="relu", affine="shift", momentum=None),
]
