"""The statistics that norms store: which of them can be estimated from batches, reading them and writing them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from normkit.errors import ArgumentError, NonFiniteError, ShapeError
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments
from normkit.surgery.norms import UNKNOWN, Norm, Survey
from normkit.surgery.operation import Operation, Skip
from normkit.surgery.replace.stored_forms import keeps_statistics
from normkit.surgery.statistics.tally import Tally

WHAT, NOT_REACHED = "statistics re-estimated", "was not reached by any batch"
NOTHING_STORED = "stores no statistics"


def estimable(op: Operation, found: Survey, learned: Collection[str] = ()) -> list[Norm]:
    """The norms whose stored statistics are the moments of batches; all others are recorded as skipped.

    `learned`: layers that were asked for because of their gamma and beta, whatever they store.
    """
    op.ask(found, [*_expected(found), *learned])
    targets = []
    for norm in found.norms:
        with op.attempt(norm.name, WHAT):
            _must_store_batch_moments(norm)
            targets.append(norm)
    for name in found.unknown:
        op.skip(name, WHAT, UNKNOWN)
    return targets


def _expected(found: Survey) -> list[str]:
    """The layers whose statistics the caller counts on: all that store some, unless they were frozen on purpose."""
    known = [norm.name for norm in found.norms if norm.spec.updates != "never"]
    return known + [name for name, layer in found.unknown.items() if keeps_statistics(layer)]


def _must_store_batch_moments(norm: Norm) -> None:
    layer, spec = norm.layer, norm.spec
    buffers = [buffer for buffer in layer._buffers.values() if buffer is not None]
    if buffers and spec.stores_instead is not None:
        raise Skip(f"stores {spec.stores_instead}")
    if layer._buffers.get("running_var") is None:
        raise Skip(NOTHING_STORED)
    if not spec.stores_batch_moments:
        raise Skip("its statistics are not the moments of batches")
    if not isinstance(layer, _BatchNorm | ChannelNorm):
        raise Skip("is frozen; unfreeze the model first")
    if any(is_lazy(buffer) for buffer in buffers):
        raise ArgumentError(f"{norm.title} has not been initialized: it has seen no batch yet. Run the model once.")


def population_of(norm: Norm, tally: Tally) -> Moments:
    """The statistics that a norm should store; a single value has no variance."""
    if tally.values <= 1:
        raise ShapeError(
            f"{norm.title} was given one value per channel in all batches together, which has no variance. Use more."
        )
    return as_stored(norm, tally.population())


def stored(norm: Norm) -> Moments:
    """A copy of the statistics that a norm stores."""
    mean, var = (norm.layer._buffers.get(name) for name in ("running_mean", "running_var"))
    assert var is not None
    wide = var.detach().to(torch.promote_types(var.dtype, torch.float32), copy=True)
    return as_stored(norm, Moments(wide if mean is None else mean.detach().to(wide.dtype, copy=True), wide, 0))


def as_stored(norm: Norm, found: Moments) -> Moments:
    """Moments as a norm stores them: without a mean, if it stores a variance alone."""
    has_mean = norm.layer._buffers.get("running_mean") is not None
    return found if has_mean else found._replace(mean=torch.zeros_like(found.mean))


@torch.no_grad()
def store(norm: Norm, new: Moments, batches: int) -> None:
    """Write the statistics of this number of batches into a norm."""
    buffers = norm.layer._buffers
    for name, value in (("running_mean", new.mean), ("running_var", new.var)):
        own = buffers.get(name)
        if own is None:
            continue
        own.copy_(value)
        if not own.isfinite().all():
            raise NonFiniteError(
                f"{norm.title}: the new {name} does not fit into {own.dtype}. Keep statistics in float32: convert the "
                "layer with .float()."
            )
    tracked = buffers.get("num_batches_tracked")
    if tracked is not None:
        tracked.fill_(batches)
