"""Stopping batch norms, and setting them going again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.batches import Forward
from normkit.layers.frozen import FrozenBatchNorm
from normkit.surgery.norms import UNKNOWN, norms, survey
from normkit.surgery.operation import Operation, Skip, become, operation
from normkit.surgery.replace.carry import Replacement, label, replacement
from normkit.surgery.replace.history import recalled
from normkit.surgery.replace.sites import Site, sites
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

    The layers become FrozenBatchNorms. Neither `train()` nor DistributedDataParallel nor an optimizer changes them, not
    even one that still holds the old gamma and beta. Copies, pickles and state_dicts hold what a BatchNorm's would.

    Args:
        model: of any kind; it may itself be a norm.
        affine: also stop gamma and beta. False: they stay the parameters they are, and learn.
        example: a batch on which to measure parity, and to see the rank of a SyncBatchNorm's input.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        found = survey(op.model)
        for site in sites(op.model, found.norms, example, forward):
            _replace(op, site, lambda site: _frozen(site, affine))
        for name, layer in found.unknown.items():
            op.skip(name, label(layer), UNKNOWN)
        return op.result(before, example, forward)


def unfreeze(
    model: nn.Module, *, example: Any = None, forward: Forward | None = None, inplace: bool = False
) -> Surgery:
    """Set every frozen batch norm going again, as the layer it was before.

    Class, options and parameters are again those that `freeze` found: the same Parameters with the same requires_grad.
    A norm that another library froze, such as torchvision's FrozenBatchNorm2d, becomes a BatchNorm of ours.

    Args:
        model: of any kind; it may itself be a norm.
        example: a batch on which to measure parity, and to see the rank of a frozen norm's input.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        for site in sites(op.model, norms(op.model), example, forward):
            if is_frozen(site):
                _replace(op, site, _thawed)
        return op.result(before, example, forward)


def is_frozen(site: Site) -> bool:
    """Whether it is a frozen batch norm, ours or another library's."""
    return site.spec.evaluates_as_batch_norm and not isinstance(site.layer, _BatchNorm)


def _replace(op: Operation, site: Site, make: Callable[[Site], Replacement]) -> None:
    with op.attempt(site.name, label(site.layer)):
        one = make(site)
        op.change(site.name, one.what, "; ".join(one.notes))
        become(site.layer, one.layer)


def _frozen(site: Site, affine: bool) -> Replacement:
    if not site.spec.evaluates_as_batch_norm:
        raise Skip("it stores no statistics" if site.spec.updates == "never" else "only batch norms freeze")
    learns = next(site.layer.parameters(recurse=False), None) is not None
    if is_frozen(site) and not (affine and learns):
        raise Skip("is frozen already")
    one = replacement(site, Wanted("frozen", trainable=not affine))
    parts = "statistics, gamma and beta" if affine and site.spec.affine else "statistics"
    return one._replace(notes=[f"{parts} stand still", *one.notes])


def _thawed(site: Site) -> Replacement:
    before = recalled(site.layer) if isinstance(site.layer, FrozenBatchNorm) else None
    if before is None:
        one = replacement(site, Wanted("batch"))
        return one._replace(notes=["what it was is not known", *one.notes])
    return Replacement(site, before, True, ["as it was before it was frozen"])
