"""Stopping batch norms, and setting them going again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.layers.frozen import FrozenBatchNorm
from normkit.surgery.norms import UNKNOWN
from normkit.surgery.operation import NothingToDo, Operation, Skip, become, operation
from normkit.surgery.replace.carry import Replacement, label, replacement
from normkit.surgery.replace.history import formers, recalled
from normkit.surgery.replace.sites import Site, sites
from normkit.surgery.replace.stored_forms import keeps_statistics
from normkit.surgery.replace.targets import Wanted
from normkit.surgery.result import Surgery
from normkit.surgery.selection import Patterns


def freeze(
    model: nn.Module,
    *,
    affine: bool = True,
    example: Any = None,
    forward: Forward | None = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
) -> Surgery:
    """Stop every batch norm: from now on it applies its stored statistics, in training as in evaluation.

    The layers become FrozenBatchNorms. Neither `train()` nor DistributedDataParallel nor an optimizer changes them, not
    even one that still holds the old gamma and beta. Copies, pickles and state_dicts hold what a BatchNorm's would.
    Norms whose statistics go on moving because they cannot be frozen are named in a warning.

    Args:
        model: of any kind; it may itself be a norm.
        affine: also stop gamma and beta. False: they stay the parameters they are, and learn.
        example: a batch on which to measure parity, and to see the rank of a SyncBatchNorm's input.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace, only, skip) as op:
        before = op.trace(example, forward)
        found = op.survey()
        moving = [norm.name for norm in found.norms if "N" in norm.spec.over or norm.spec.updates != "never"]
        op.ask(found, [*moving, *(name for name, layer in found.unknown.items() if keeps_statistics(layer))])
        for site in sites(op.model, found.norms, example, forward):
            _replace(op, site, lambda site: _frozen(site, affine))
        for name, layer in found.unknown.items():
            op.skip(name, label(layer), UNKNOWN)
        return op.result(before, example, forward)


def unfreeze(
    model: nn.Module,
    *,
    example: Any = None,
    forward: Forward | None = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
) -> Surgery:
    """Set the batch norms that `freeze` stopped going again, as the layers they were before.

    Class, options and parameters are again those that `freeze` found: the same Parameters with the same requires_grad.
    Norms that were built frozen, such as torchvision's FrozenBatchNorm2d, stay so unless `only` names them: then they
    become BatchNorms of ours.

    Args:
        model: of any kind; it may itself be a norm.
        example: a batch on which to measure parity, and to see the rank of a frozen norm's input.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave frozen, with what is inside them.
        inplace: change the model itself, not a copy.
    """
    with operation(model, inplace, only, skip) as op:
        before = op.trace(example, forward)
        found = op.survey()
        places = [site for site in sites(op.model, found.norms, example, forward) if site.is_frozen]
        meant = op.ask(found, [site.name for site in places if _was_stopped(site)])
        for site in places:
            if site.name in meant:
                _replace(op, site, _thawed)
            else:
                op.skip(site.name, label(site.layer), "was frozen from the start; only= may name it")
        return op.result(before, example, forward)


def _replace(op: Operation, site: Site, make: Callable[[Site], Replacement]) -> None:
    with op.attempt(site.name, label(site.layer)):
        one = make(site)
        op.change(site.name, one.what, "; ".join(one.notes))
        become(site.layer, one.layer)


def _frozen(site: Site, affine: bool) -> Replacement:
    if not site.spec.evaluates_as_batch_norm:
        raise Skip("it stores no statistics" if site.spec.updates == "never" else "only batch norms freeze")
    learns = next(site.layer.parameters(recurse=False), None) is not None
    if site.is_frozen and not (affine and learns):
        raise NothingToDo("is frozen already")
    one = replacement(site, Wanted("frozen", trainable=not affine))
    parts = "statistics, gamma and beta" if affine and site.spec.affine else "statistics"
    return one._replace(notes=[f"{parts} stand still", *one.notes])


def _was_stopped(site: Site) -> bool:
    """Whether it was frozen while it was in a model: it remembers what it was."""
    return isinstance(site.layer, FrozenBatchNorm) and bool(formers(site.layer))


def _thawed(site: Site) -> Replacement:
    before = recalled(site.layer) if isinstance(site.layer, FrozenBatchNorm) else None
    if before is None:
        one = replacement(site, Wanted("batch"))
        return one._replace(notes=["what it was is not known", *one.notes])
    return Replacement(site, before, True, ["as it was before it was frozen"], site.layer)
