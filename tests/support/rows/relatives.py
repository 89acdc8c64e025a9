"""Relatives of BatchNorm: other statistics across examples."""

from __future__ import annotations

from typing import Any

from torch import nn

import normkit as nk
from support.case import Case
from support.formulas import across


def row(
    name: str, shape: tuple[int, ...], formula: Any, option: str = "", *args: Any, twin: Any = None, **options: Any
):
    build = getattr(nk, name)
    free = (*([] if formula is across.split_batch_norm else [0]), *range(2, len(shape)))  # as many parts as examples
    # Renorm's r and d carry no gradient, but move with the input as long as they are free to.
    stops = formula is across.batch_renorm and options.get("d_max") != 0.0
    return Case(
        name, lambda: build(shape[1], *args, **options), shape, formula, twin, option, free, stops_gradient=stops
    )


def domain_row(name: str, shape: tuple[int, ...], option: str = "", **options: Any) -> Case:
    def build() -> nn.Module:
        layer = getattr(nk, name)(shape[1], 3, **options)
        layer.domain = 1
        return layer

    return Case(name, build, shape, across.domain_batch_norm, None, option, (0, *range(2, len(shape))))


def shuffled_row(name: str, shape: tuple[int, ...], option: str = "", **options: Any) -> Case:
    """With an order that is always the same: what is compared with another call must not be drawn anew."""

    def build() -> nn.Module:
        layer = getattr(nk, name)(shape[1], **options)
        layer._order = across.odd_ones_first
        return layer

    return Case(name, build, shape, across.shuffled_batch_norm, None, option, (0, *range(2, len(shape))))


ROWS = [
    row("BatchRenorm1d", (8, 5), across.batch_renorm, "rows"),
    row("BatchRenorm1d", (6, 5, 7), across.batch_renorm, activation="tanh"),
    row("BatchRenorm2d", (4, 5, 6, 7), across.batch_renorm),
    row("BatchRenorm2d", (4, 5, 6, 7), across.batch_renorm, "clipped", r_max=1.05, d_max=0.1, affine="scale"),
    row("BatchRenorm2d", (4, 5, 6, 7), across.batch_renorm, "cumulative-no-affine", momentum=None, affine=False),
    row("BatchRenorm3d", (3, 4, 3, 4, 5), across.batch_renorm),
    row("BatchRenorm1d", (6, 5, 7), across.batch_renorm, "still", r_max=1.0, d_max=0.0, activation="tanh"),
    row("BatchRenorm2d", (4, 5, 6, 7), across.batch_renorm, "still", r_max=1.0, d_max=0.0),
    row("BatchRenorm3d", (3, 4, 3, 4, 5), across.batch_renorm, "still", r_max=1.0, d_max=0.0, affine="scale"),
    row("BatchRenorm1d", (6, 5, 7), across.batch_renorm, "warm-up", warmup_steps=4),  # the count is 1 to 6
    row("BatchRenorm2d", (4, 5, 6, 7), across.batch_renorm, "cold", warmup_steps=10, activation="silu"),
    row("GhostBatchNorm1d", (8, 5), across.ghost_batch_norm, chunk_size=4),
    row("GhostBatchNorm1d", (7, 5, 4), across.ghost_batch_norm, "uneven", chunk_size=3, activation="silu"),
    row("GhostBatchNorm2d", (5, 4, 3, 6), across.ghost_batch_norm, chunk_size=2, affine="shift"),
    row("GhostBatchNorm2d", (4, 5, 6, 7), across.ghost_batch_norm, "one-chunk", twin=lambda: nn.BatchNorm2d(5)),
    shuffled_row("ShuffledBatchNorm1d", (8, 5), chunk_size=4),
    shuffled_row("ShuffledBatchNorm1d", (7, 5, 4), "uneven", chunk_size=3, activation="silu"),
    shuffled_row("ShuffledBatchNorm2d", (5, 4, 3, 6), chunk_size=2, affine="shift"),
    row("ShuffledBatchNorm2d", (4, 5, 6, 7), across.batch_norm, "one-chunk", twin=lambda: nn.BatchNorm2d(5)),
    row("SplitBatchNorm2d", (3, 5, 4, 3), across.split_batch_norm, num_splits=3),
    row("SplitBatchNorm2d", (3, 5, 4, 3), across.split_batch_norm, "silu", num_splits=3, activation="silu"),
    row("FrozenBatchNorm1d", (8, 5), across.frozen_batch_norm, "rows"),
    row("FrozenBatchNorm1d", (6, 5, 7), across.frozen_batch_norm, activation="gelu", affine="scale"),
    row("FrozenBatchNorm2d", (4, 5, 6, 7), across.frozen_batch_norm, eps=0.02),
    row("FrozenBatchNorm2d", (4, 5, 6, 7), across.frozen_batch_norm, "no-affine", affine=False),
    row("FrozenBatchNorm3d", (3, 4, 3, 4, 5), across.frozen_batch_norm, activation="relu"),
    domain_row("DomainBatchNorm1d", (8, 5)),
    domain_row("DomainBatchNorm1d", (6, 5, 7), "sequence", activation="sigmoid", affine="shift"),
    domain_row("DomainBatchNorm2d", (4, 5, 6, 7), momentum=None),
    domain_row("DomainBatchNorm2d", (4, 5, 6, 7), "affine-per-domain", affine_per_domain=True, activation="relu"),
    domain_row("DomainBatchNorm3d", (3, 4, 3, 4, 5), affine_per_domain=True, affine="scale"),
    row("AccumulatedBatchNorm1d", (8, 5), across.batch_norm, "rows", micro_batches=2),
    row("AccumulatedBatchNorm1d", (6, 5, 7), across.batch_norm, micro_batches=4, affine="scale"),
    row("AccumulatedBatchNorm3d", (3, 4, 3, 4, 5), across.batch_norm, micro_batches=2, activation="tanh"),
    row("AccumulatedBatchNorm2d", (4, 5, 6, 7), across.batch_norm, micro_batches=3),
    row("AccumulatedBatchNorm2d", (4, 5, 6, 7), across.batch_norm, "relu", micro_batches=2, activation="relu"),
    row("SyncBatchNorm", (8, 5), across.batch_norm, "rows", twin=lambda: nn.BatchNorm1d(5)),
    row("SyncBatchNorm", (4, 5, 6, 7), across.batch_norm, twin=lambda: nn.BatchNorm2d(5)),
    row("SyncBatchNorm", (3, 4, 3, 4, 5), across.batch_norm, "relu", activation="relu", affine="shift"),
]
