"""What a norm of any kind is given in one call: how many values a statistic has, how eps compares, what is padding."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.doctor.evidence.padding import padded_share
from normkit.surgery.norms import Norm, channels_second

_WITHIN = ("group", "instance", "layer", "rms")  # kinds whose variance is taken of sets inside each example


class Given(NamedTuple):
    """One call of a norm.

    Attributes:
        batch: the number of the batch.
        shape: of the input.
        values: how many values one statistic is taken of.
        eps_over_variance: the median over all statistics of one call; None where that is not known.
        padded: the part of the positions that are padding, and counted.
    """

    batch: int
    shape: tuple[int, ...]
    values: int
    eps_over_variance: float | None
    padded: float


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a layer is called with."""
    x = args[0] if args else kwargs.get("input", kwargs.get("x", kwargs.get("hidden_states")))
    return x.detach() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 else None


def given(norm: Norm, batch: int, x: Tensor, mask: Any) -> Given:
    """Look at the input of one call."""
    x = channels_second(norm, x)
    sets = _sets(norm, x)
    values = x.numel() // max(x.shape[1], 1) if sets is None else sets.shape[-1]
    counts_positions = "S" in norm.spec.over and mask is None
    padded = padded_share(x) if counts_positions else 0.0
    return Given(batch, tuple(x.shape), values, _eps_over_variance(norm, sets), padded)


def _eps_over_variance(norm: Norm, sets: Tensor | None) -> float | None:
    if sets is None or norm.spec.eps is None or sets.numel() == 0:
        return None
    wide = sets.float()
    variance = wide.var(-1, correction=0) if norm.spec.subtracts_mean else wide.square().mean(-1)
    finite = variance[variance.isfinite()]
    if finite.numel() == 0:
        return None
    return norm.spec.eps / max(finite.median().item(), torch.finfo(torch.float32).tiny)


def _sets(norm: Norm, x: Tensor) -> Tensor | None:
    """The input as (number of statistics, values of each); None for norms across examples and those of odd shapes."""
    kind, spec = norm.spec.kind, norm.spec
    if kind not in _WITHIN:
        return None
    if kind == "group":
        groups = spec.num_groups or 1
        return x.reshape(x.shape[0] * groups, -1) if x.shape[1] % groups == 0 else None
    if kind == "instance":
        return x.reshape(x.shape[0] * x.shape[1], -1)
    if spec.channels_first:
        return x.movedim(1, -1).reshape(-1, x.shape[1])
    shape = tuple(getattr(norm.layer, "normalized_shape", x.shape[-1:]))
    return x.reshape(-1, prod(shape)) if tuple(x.shape[-len(shape) :]) == shape else None
