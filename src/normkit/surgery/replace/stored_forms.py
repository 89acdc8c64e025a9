"""The forms in which norms keep what others keep as a mean, a variance, a gamma and a beta for each channel."""

from __future__ import annotations

from functools import singledispatch
from math import sqrt

import torch
from torch import Tensor, nn

from normkit.layers.batch import PositionBatchNorm2d
from normkit.layers.domain import DomainBatchNorm
from normkit.layers.moving import MovingBatchNorm2d
from normkit.layers.rms import ScaleNorm
from normkit.layers.whitened import WhitenedBatchNorm
from normkit.surgery.norms import parts_of

Statistics = dict[str, Tensor | int]  # by the names of buffers; they broadcast to the buffers' shapes


def keeps_statistics(layer: nn.Module) -> bool:
    """Whether a layer keeps running statistics, in whatever form."""
    return any(name.startswith("running_") and kept is not None for name, kept in layer._buffers.items())


@singledispatch
def in_form_of(layer: nn.Module, mean: Tensor, var: Tensor, count: Tensor | int) -> Statistics | None:
    """A mean and a variance per channel as this layer keeps them; None if it keeps just these."""
    return None


@in_form_of.register
def _(layer: DomainBatchNorm, mean: Tensor, var: Tensor, count: Tensor | int) -> Statistics:
    return {"running_mean": mean, "running_var": var, "num_batches_tracked": count}  # the same for every domain


@in_form_of.register
def _(layer: PositionBatchNorm2d, mean: Tensor, var: Tensor, count: Tensor | int) -> Statistics:
    return {"running_mean": _per_position(mean), "running_var": _per_position(var), "num_batches_tracked": count}


@in_form_of.register
def _(layer: MovingBatchNorm2d, mean: Tensor, var: Tensor, count: Tensor | int) -> Statistics:
    # Its count tells how many of the last batches it has seen, and it has seen none.
    return {"running_var": mean.square() + var, "num_batches_tracked": 0}


@in_form_of.register
def _(layer: WhitenedBatchNorm, mean: Tensor, var: Tensor, count: Tensor | int) -> Statistics:
    # Of channels that are not correlated the whitening matrix is diagonal, and evaluation is a BatchNorm's.
    scales = (var + layer.eps).rsqrt().reshape(-1, layer.group_size)
    return {"running_mean": mean, "running_whitener": torch.diag_embed(scales), "num_batches_tracked": count}


@torch.no_grad()
def write_statistics_(layer: nn.Module, mean: Tensor, var: Tensor, count: Tensor | int) -> None:
    """Fill a layer's buffers with a mean and a variance per channel, in the form in which it keeps them."""
    kept: Statistics = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
    for name, value in (in_form_of(layer, mean, var, count) or kept).items():
        place = layer._buffers.get(name)
        if place is not None:
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)


@torch.no_grad()
def copy_to_parts_(layer: nn.Module) -> None:
    """Let the auxiliary norms of a layer, if it has any, begin with its gamma, beta and statistics."""
    for part in parts_of(layer):
        for name, own in (*layer._parameters.items(), *layer._buffers.items()):
            place = getattr(part, name, None)
            if own is not None and place is not None:
                place.copy_(own)
                place.requires_grad_(own.requires_grad)


def affine_in_form_of(new: nn.Module, old: nn.Module, value: Tensor, place: Tensor) -> Tensor | None:
    """A gamma or beta of `old` as `new` keeps it, where that is not a tensor of the same shape; None elsewhere.

    A ScaleNorm has one length for what others scale channel by channel: gamma's own length is what it gives to vectors
    whose elements have variance one.
    """
    if isinstance(old, ScaleNorm) and not isinstance(new, ScaleNorm):
        return (value / sqrt(old.dim)).expand(place.shape).clone()
    if isinstance(new, ScaleNorm) and not isinstance(old, ScaleNorm):
        length: Tensor = value.norm()
        return length.reshape(1)
    if isinstance(new, PositionBatchNorm2d) and value.dim() == 1:
        return _per_position(value).expand(place.shape).clone()
    if isinstance(new, DomainBatchNorm) and value.dim() < place.dim():
        return value.expand(place.shape).clone()  # the same for every domain
    return None


def _per_position(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None]
