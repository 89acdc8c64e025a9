"""Folding: the parameters of hosts take over the scales and shifts of norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from normkit.surgery.fold.gamma import remove_affine_
from normkit.surgery.fold.hosts import Host
from normkit.surgery.fold.plan import Fold, per_channel
from normkit.surgery.operation import Skip, become


def absorb(folds: Iterable[Fold]) -> None:
    """Give the hosts the norms' scales and shifts, and turn the norms into what remains of them."""
    of_host: dict[Host, list[Fold]] = defaultdict(list)
    for fold in folds:
        for host in fold.channels:
            of_host[host].append(fold)
    for host, own in of_host.items():
        _take(host, own)
    for fold in folds:
        if fold.keeps_norm:
            remove_affine_(fold.norm)
        else:
            become(fold.norm.layer, fold.map.remains(fold.norm.layer, fold.dense))


def _take(host: Host, folds: list[Fold]) -> None:
    """Change a layer's parameters: computed in float64, rounded once."""
    product, weight = host.products[0], host.weight.detach().to(torch.float64, copy=True)
    own = product.by_channels(weight)  # (groups, outputs, inputs, ...), in the same memory
    bias = weight.new_zeros(own.shape[0] * own.shape[1]) if host.bias is None else host.bias.detach().double()
    rest = [1] * (own.dim() - 3)
    for fold in folds:
        scale, shift = (
            per_channel(values, fold.channels[host], otherwise, weight.device)
            for values, otherwise in ((fold.map.scale, 1.0), (fold.map.shift, 0.0))
        )
        if fold.hosts_are == "before":
            bias = bias * scale + shift
            own *= scale.reshape(product.groups, -1, 1, *rest)
        else:
            bias = bias + product.constant_output(weight, shift) if shift.any() else bias
            own *= scale.reshape(product.groups, 1, -1, *rest)
    _write(host, weight, bias)


@torch.no_grad()
def _write(host: Host, weight: Tensor, bias: Tensor) -> None:
    old = host.weight
    kind = old.dtype if host.bias is None else host.bias.dtype
    if not (weight.to(old.dtype).isfinite().all() and bias.to(kind).isfinite().all()):
        raise Skip(f"the parameters of {host.name} would not be finite in {old.dtype}")
    old.copy_(weight)
    if host.bias is not None:
        host.bias.copy_(bias)
    elif bias.any():
        host.owner.module.bias = nn.Parameter(bias.to(old.dtype), requires_grad=old.requires_grad)
