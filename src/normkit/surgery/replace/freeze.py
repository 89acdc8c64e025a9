"""Batch norms that stop, and go on again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.batches import Forward
from normkit.layers.frozen import FrozenBatchNorm
from normkit.surgery.norms import unknown_norms
from normkit.surgery.operation import Operation, become, operation
from normkit.surgery.replace.builders import is_across
from normkit.surgery.replace.carry import Replacement, label, replacement
from normkit.surgery.replace.history import recalled
from normkit.surgery.replace.sites import Refused, Site, sites
from normkit.surgery.replace.targets import Wanted
from normkit.surgery.result import Surgery


def freeze(
    model: nn.Module,
    *,
    affine: bool = True,
    example: Any = None,
    forward: Forward | None = None,
    inplace: bool = False,
) -> Surgery:
    """Stop every batch norm: from now on it applies its stored statistics, in training as in evaluation.

    The layers become FrozenBatchNorms. Neither `train()` nor an optimizer, not even one that still holds the old gamma
    and beta, nor DistributedDataParallel moves them; copies, pickles and state_dicts hold what a BatchNorm's would.

    Args:
        model: of any kind; it may itself be a norm.
        affine: also stop gamma and beta. False: they stay the parameters they are, and learn.
        example: a batch, to measure parity with, and to see the rank of what a SyncBatchNorm takes.
        forward: `forward(model, batch)`, if the model is not called with the batch, or the first element of it.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        for site in sites(op.model, example, forward):
            _replace(op, site, lambda site: _frozen(site, affine))
        for name, layer in unknown_norms(op.model):
            op.skip(name, label(layer), "is not a norm we know")
        return op.result(before, example, forward)


def unfreeze(
    model: nn.Module, *, example: Any = None, forward: Forward | None = None, inplace: bool = False
) -> Surgery:
    """Set every frozen batch norm going again, as the layer it was before.

    Class, options and parameters come back as `freeze` found them, the same Parameters with the same requires_grad.
    What was never frozen by us, such as torchvision's FrozenBatchNorm2d, becomes a BatchNorm of ours.

    Args:
        model: of any kind; it may itself be a norm.
        example: a batch, to measure parity with, and to see the rank of what a frozen norm takes.
        forward: `forward(model, batch)`, if the model is not called with the batch, or the first element of it.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        for site in sites(op.model, example, forward):
            if is_frozen(site):
                _replace(op, site, _thawed)
        return op.result(before, example, forward)


def is_frozen(site: Site) -> bool:
    """Whether it is a batch norm that has stopped, ours or somebody else's."""
    return is_across(site) and not isinstance(site.layer, _BatchNorm)


def _replace(op: Operation, site: Site, make: Callable[[Site], Replacement]) -> None:
    try:
        one = make(site)
    except Refused as why:
        op.skip(site.name, label(site.layer), str(why))
        return
    op.change(site.name, one.what, "; ".join(one.notes))
    become(site.layer, one.layer)


def _frozen(site: Site, affine: bool) -> Replacement:
    if not is_across(site):
        raise Refused("it stores no statistics" if site.spec.updates == "never" else "only batch norms freeze")
    learns = next(site.layer.parameters(), None) is not None
    if is_frozen(site) and not (affine and learns):
        raise Refused("is frozen already")
    one = replacement(site, Wanted("frozen", trainable=not affine))
    parts = "statistics, gamma and beta" if affine and site.spec.affine else "statistics"
    return one._replace(notes=[f"{parts} stand still", *one.notes])


def _thawed(site: Site) -> Replacement:
    before = recalled(site.layer) if isinstance(site.layer, FrozenBatchNorm) else None
    if before is None:
        one = replacement(site, Wanted("batch"))
        return one._replace(notes=["what it was is not known", *one.notes])
    return Replacement(site, before, True, ["as it was before it was frozen"])
