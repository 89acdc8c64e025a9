"""Domain norms as what they are for one of their domains."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from normkit.layers.domain import DomainBatchNorm
from normkit.spec import describe
from normkit.surgery.norms import STATISTICS
from normkit.surgery.operation import Skip
from normkit.surgery.replace.sites import Site
from normkit.surgery.replace.targets import TARGETS


def of_one_domain(site: Site) -> Site:
    """A domain norm as the BatchNorm of its present domain; every other layer as it is.

    Gamma and beta are the very Parameters, unless each domain has its own; these and the statistics are copies.
    """
    layer = site.layer
    if not isinstance(layer, DomainBatchNorm):
        return site
    if not site.spec.exact:
        raise Skip(f"{site.class_name} may do more than a DomainBatchNorm")
    k = 0 if layer.num_domains == 1 else layer.domain
    if k is None:
        raise Skip(
            f"it has the statistics of {layer.num_domains} domains; choose one around the call: "
            "with nk.domain(model, k)"
        )
    if not 0 <= k < layer.num_domains:
        raise Skip(f"it has the domains 0 to {layer.num_domains - 1}, and is set to {k}")
    twin = copy.copy(layer)
    twin.__class__ = TARGETS["batch"].ours[site.dimensions()]  # type: ignore[assignment]
    for name in ("num_domains", "domain", "affine_per_domain"):
        vars(twin).pop(name, None)
    vars(twin)["_parameters"] = {name: _own_parameter(layer, name, k) for name in layer._parameters}
    vars(twin)["_buffers"] = {name: layer.get_buffer(name)[k].clone() for name in STATISTICS}
    spec = describe(twin)
    assert spec is not None
    return site._replace(layer=twin, spec=spec)


def _own_parameter(layer: DomainBatchNorm, name: str, k: int) -> nn.Parameter | None:
    whole = layer._parameters[name]
    if whole is None or not layer.affine_per_domain:
        return whole
    return nn.Parameter(whole.detach()[k].clone(), whole.requires_grad)


@contextmanager
def in_first_domain(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let domain norms that wait to be told their domain use the first in the block."""
    waiting = [layer for layer in layers if isinstance(layer, DomainBatchNorm) and layer.domain is None]
    try:
        for layer in waiting:
            layer.domain = 0
        yield
    finally:
        for layer in waiting:
            layer.domain = None


def can_be_evaluated(layers: Sequence[nn.Module]) -> bool:
    """Whether no domain norm among them refuses to be evaluated, because no batch has updated its statistics."""
    counts = [layer.get_buffer("num_batches_tracked") for layer in layers if isinstance(layer, DomainBatchNorm)]
    return all(not count.is_meta and bool(count.all()) for count in counts)
