"""Normalization of weights."""

from __future__ import annotations

from typing import Any

import normkit as nk
from support.case import Case
from support.formulas import weights

SHAPE = (3, 4, 6, 7)
RELU = "1.7139588594436646"  # the authors' constant, as a number of its own


def conv_row(option: str = "", gain: str = "1", **options: Any) -> Case:
    return Case(
        "ScaledStdConv2d",
        lambda: nk.ScaledStdConv2d(4, 4, 3, padding=1, **options),
        SHAPE,
        weights.scaled_std_conv(gain),
        option=option,
        free=(0, 2, 3),
        exact=False,
    )


ROWS = [
    conv_row(),
    conv_row("grouped", groups=2),
    conv_row("gain-relu", RELU, activation_gain="relu", bias=False),
    conv_row("eps", eps=22.0),  # larger than some channels' sums of squares, and not than others'
    Case("SkipInit", nk.SkipInit, SHAPE, weights.skip_init, free=(0, 1, 2, 3)),
]
