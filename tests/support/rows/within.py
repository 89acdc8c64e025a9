"""Statistics within an example."""

from __future__ import annotations

from typing import Any

from torch import nn

import normkit as nk
from support.case import Case
from support.formulas import within

FORMULAS = {
    "LayerNorm": within.layer_norm,
    "RMSNorm": within.rms_norm,
    "ScaleNorm": within.scale_norm,
    "LayerNorm2d": within.layer_norm_of_maps,
    "RMSNorm2d": within.rms_norm_of_maps,
    "GroupNorm": within.group_norm,
    "InstanceNorm1d": within.instance_norm,
    "InstanceNorm2d": within.instance_norm,
    "InstanceNorm3d": within.instance_norm,
    "FilterResponseNorm2d": within.filter_response_norm,
    "LocalResponseNorm": within.local_response_norm,
}


def row(
    name: str,
    shape: tuple[int, ...],
    args: tuple[Any, ...],
    option: str = "",
    *,
    free: tuple[int, ...] | None = None,
    twin: bool = True,
    **options: Any,
) -> Case:
    """A row of one of torch's layers or ours; `free` is by default all but the channels."""
    beyond = "activation" in options or options.get("affine") in ("scale", "shift")
    has_twin = twin and hasattr(nn, name) and not beyond
    return Case(
        name,
        lambda: getattr(nk, name)(*args, **options),
        shape,
        FORMULAS[name],
        (lambda: getattr(nn, name)(*args, **options)) if has_twin else None,
        option,
        free=(0, *range(2, len(shape))) if free is None else free,
    )


ROWS = [
    # over the last dimensions
    row("LayerNorm", (4, 6, 7), (7,), free=(0, 1)),
    row("LayerNorm", (6, 8), (8,), "rows", free=(0,)),
    row("LayerNorm", (5, 3, 4, 6), ([3, 4, 6],), "example", free=(0,)),
    row("LayerNorm", (3, 4, 5, 6), ([5, 6],), "eps", free=(0, 1), eps=0.03),
    row("LayerNorm", (4, 6, 7), (7,), "no-affine", free=(0, 1), elementwise_affine=False),
    row("LayerNorm", (4, 6, 7), (7,), "no-bias", free=(0, 1), bias=False),
    row("LayerNorm", (4, 6, 7), (7,), "gelu", free=(0, 1), activation="gelu"),
    row("LayerNorm", (4, 6, 7), (7,), "tanh-no-affine", free=(0, 1), activation="tanh", elementwise_affine=False),
    row("RMSNorm", (4, 6, 7), (7, 1e-6), free=(0, 1)),
    row("RMSNorm", (6, 8), (8, 1e-5), "rows", free=(0,)),
    row("RMSNorm", (3, 4, 5, 6), ([5, 6], 0.03), "eps", free=(0, 1)),
    row("RMSNorm", (4, 6, 7), (7, 1e-6), "no-affine", free=(0, 1), elementwise_affine=False),
    row("RMSNorm", (4, 6, 7), (7, 1e-6), "silu", free=(0, 1), activation="silu"),
    row("ScaleNorm", (4, 6, 7), (7,), free=(0, 1)),
    row("ScaleNorm", (6, 8), (8,), "eps", free=(0,), eps=0.03),
    row("ScaleNorm", (3, 4, 5, 6), (6,), "leaky_relu", free=(0, 1, 2), activation="leaky_relu"),
    # over the channels of each position
    row("LayerNorm2d", (4, 5, 6, 7), (5,)),
    row("LayerNorm2d", (4, 5, 6, 7), (5,), "relu-no-affine", activation="relu", affine=False, eps=0.03),
    row("LayerNorm2d", (4, 5, 6, 7), (5,), "gelu-shift", activation="gelu", affine="shift"),
    row("RMSNorm2d", (4, 5, 6, 7), (5,)),
    row("RMSNorm2d", (4, 5, 6, 7), (5, 0.03), "silu-no-affine", activation="silu", affine=False),
    # over groups of channels
    row("GroupNorm", (4, 6, 5, 7), (3, 6)),
    row("GroupNorm", (5, 8), (2, 8), "rows"),
    row("GroupNorm", (4, 6, 7), (2, 6), "eps", eps=0.03),
    row("GroupNorm", (3, 4, 3, 4, 5), (2, 4), "volumes"),
    row("GroupNorm", (4, 6, 5, 7), (1, 6), "one-group"),
    row("GroupNorm", (4, 6, 5, 7), (6, 6), "each-channel"),
    row("GroupNorm", (4, 6, 5, 7), (3, 6), "no-affine", affine=False),
    row("GroupNorm", (4, 6, 5, 7), (3, 6), "scale", affine="scale"),
    row("GroupNorm", (4, 6, 5, 7), (3, 6), "relu", activation="relu"),
    row("GroupNorm", (4, 6, 7), (2, 6), "silu-shift", activation="silu", affine="shift"),
    # over the positions of a channel
    row("InstanceNorm1d", (5, 4, 7), (4,)),
    row("InstanceNorm2d", (4, 5, 6, 7), (5,)),
    row("InstanceNorm3d", (3, 4, 3, 4, 5), (4,)),
    row("InstanceNorm1d", (5, 4, 7), (4,), "tracked", affine=True, track_running_stats=True),
    row("InstanceNorm2d", (4, 5, 6, 7), (5,), "affine", affine=True, eps=0.03),
    row("InstanceNorm2d", (4, 5, 6, 7), (5,), "tracked", affine=True, track_running_stats=True, momentum=0.37),
    # Torch multiplies by a momentum of 0, and even so takes NaN into its statistics.
    row("InstanceNorm2d", (4, 5, 6, 7), (5,), "still", track_running_stats=True, momentum=None, twin=False),
    row("InstanceNorm3d", (3, 4, 3, 4, 5), (4,), "tracked", track_running_stats=True),
    row("InstanceNorm1d", (5, 4, 7), (4,), "relu", affine=True, activation="relu"),
    row("InstanceNorm2d", (4, 5, 6, 7), (5,), "leaky_relu", affine="scale", activation="leaky_relu"),
    row(
        "InstanceNorm2d",
        (4, 5, 6, 7),
        (5,),
        "gelu-tracked",
        affine="shift",
        activation="gelu",
        track_running_stats=True,
    ),
    row("FilterResponseNorm2d", (4, 5, 6, 7), (5,)),
    row("FilterResponseNorm2d", (4, 5, 6, 7), (5,), "eps", eps=0.03),
    row("FilterResponseNorm2d", (4, 5, 6, 7), (5,), "no-threshold", threshold=False),
    row("FilterResponseNorm2d", (4, 5, 6, 7), (5,), "learnable-eps", learnable_eps=True),
    row("FilterResponseNorm2d", (4, 5, 6, 7), (5,), "learnable-eps-alone", learnable_eps=True, threshold=False),
    # over neighbouring channels
    row("LocalResponseNorm", (4, 7, 5, 6), (5,)),
    row("LocalResponseNorm", (4, 7, 6), (3, 0.3, 0.6, 2.0), "signal"),
    row("LocalResponseNorm", (3, 4, 3, 4, 5), (2,), "even", alpha=0.5, beta=0.5),
]
