"""Population statistics for the norms of a model (Ioffe & Szegedy 2015, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from normkit.batches import Forward, repeatable
from normkit.errors import ArgumentError, NonFiniteError, ShapeError
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments
from normkit.surgery.norms import Norm, norms, unknown_norms
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Surgery
from normkit.surgery.statistics.collect import Batches, Progress, gather, gather_last, shown, visits
from normkit.surgery.statistics.drift import drift
from normkit.surgery.statistics.tally import Method, Tally

WHAT, NOT_REACHED = "statistics re-estimated", "was not reached by any batch"
_WITH_BATCH_MOMENTS = ("batch", "renorm", "accumulated", "switchable", "evo-b0")
_WHY_NOT = {
    "whitened": "stores a whitening matrix, which no mean and variance per channel make up for",
    "moving": "stores mean squares of the last batches, not moments",
    "domain": "stores statistics per domain; train on batches of each domain instead",
    "instance": "stores an average over examples, each of which has statistics of its own in training",
}


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    method: Method = "pooled",
    exact: bool = False,
    example: Any = None,
    inplace: bool = False,
    progress: Progress | None = None,
) -> Surgery:
    """Replace the stored statistics of a model's norms by those of its layers' inputs on these batches.

    Norms see the statistics of each batch, as in training; everything else runs as in evaluation. The modes are the
    model's again afterwards, and `num_batches_tracked` is the number of batches.

    Args:
        model: any model; of averaged weights (EMA, SWA) as well.
        batches: gone through once; with `exact`, once for every norm and once more.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        method: "pooled": mean and unbiased variance over all values of all batches, whatever their sizes. "paper":
            Algorithm 2, the plain averages of the batches' means and unbiased variances.
        exact: layer by layer, in the order they run: each norm's statistics are taken with all norms before it in
            evaluation, with their new statistics, which is what it will be given from then on.
        example: a batch to measure on how far the outputs move.
        inplace: on the model itself instead of a copy.
        progress: called after each batch with how many were run so far.
    """
    if method not in get_args(Method):
        raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
    each = Batches(repeatable(batches, "recalibrate(exact=True)") if exact else batches, forward, progress)
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        targets = find_targets(op)
        if not targets:
            each.check()
        elif exact:
            _one_by_one(op, targets, each, method)
        else:
            tallies, count = gather(op.model, targets, each, method)
            for norm in targets:
                _settle(op, norm, tallies.get(norm.name), count, method)
        return op.result(before, example, forward)


def find_targets(op: Operation) -> list[Norm]:
    """The norms whose stored statistics are the moments of batches; the others are noted as skipped, and why."""
    reasons = [(norm, _why_not(norm)) for norm in norms(op.model)]
    for norm, reason in reasons:
        if reason is not None:
            op.skip(norm.name, WHAT, reason)
    for name, _ in unknown_norms(op.model):
        op.skip(name, WHAT, "is not a norm we know")
    return [norm for norm, reason in reasons if reason is None]


def _why_not(norm: Norm) -> str | None:
    layer, spec = norm.layer, norm.spec
    buffers = [buffer for buffer in layer._buffers.values() if buffer is not None]
    if not buffers or layer._buffers.get("running_var") is None:
        return _WHY_NOT.get(spec.kind, "stores no statistics") if buffers else "stores no statistics"
    if spec.kind not in _WITH_BATCH_MOMENTS:
        return _WHY_NOT.get(spec.kind, "its statistics are not the moments of batches")
    if not isinstance(layer, _BatchNorm | ChannelNorm):
        return "is frozen; unfreeze the model first"
    if any(is_lazy(buffer) for buffer in buffers):
        raise ArgumentError(f"{shown(norm)} has not been initialized: no batch has come yet. Run the model once.")
    return None


def _one_by_one(op: Operation, targets: Sequence[Norm], batches: Batches, method: Method) -> None:
    """Each norm behind those that are done; one that runs several times in a forward sees batch statistics."""
    by_name = {norm.name: norm for norm in targets}
    runs = visits(op.model, targets, batches)
    for name, times in runs.items():
        norm = by_name.pop(name)
        if times == 1:
            tally, count = gather_last(op.model, norm, batches, method)
        else:
            tallies, count = gather(op.model, [norm], batches, method)
            tally = tallies[name]
        _settle(op, norm, tally, count, method)
    for norm in by_name.values():
        _settle(op, norm, None, 0, method)


def _settle(op: Operation, norm: Norm, tally: Tally | None, count: int, method: Method) -> None:
    if tally is None:
        op.skip(norm.name, WHAT, NOT_REACHED)
        return
    old, new = stored(norm), population_of(norm, tally)
    store(norm, new, count)
    how = "over all values" if method == "pooled" else "averages of batches"
    moved = drift(old, new, norm.spec.eps or 0.0)
    op.change(norm.name, WHAT, f"{how} of {count} batches, {tally.values:,} per channel; {moved}")


def population_of(norm: Norm, tally: Tally) -> Moments:
    """What a norm should store; of a single value there is nothing to know."""
    if tally.values <= 1:
        raise ShapeError(
            f"{shown(norm)} was given one value per channel in all batches together, which has no variance. Use more."
        )
    found = tally.population()
    return found if norm.layer._buffers.get("running_mean") is not None else _without_mean(found)


def stored(norm: Norm) -> Moments:
    """A copy of what a norm stores."""
    mean, var = (norm.layer._buffers.get(name) for name in ("running_mean", "running_var"))
    assert var is not None
    wide = var.detach().to(torch.promote_types(var.dtype, torch.float32), copy=True)
    found = Moments(wide if mean is None else mean.detach().to(wide.dtype, copy=True), wide, 0)
    return found if mean is not None else _without_mean(found)


def _without_mean(found: Moments) -> Moments:
    """The same for a layer that stores a variance alone."""
    return found._replace(mean=torch.zeros_like(found.mean))


@torch.no_grad()
def store(norm: Norm, new: Moments, count: int) -> None:
    """Write statistics into a norm, as those of so many batches."""
    buffers = norm.layer._buffers
    for name, value in (("running_mean", new.mean), ("running_var", new.var)):
        own = buffers.get(name)
        if own is None:
            continue
        own.copy_(value)
        if not own.isfinite().all():
            raise NonFiniteError(
                f"{shown(norm)}: the new {name} does not fit into {own.dtype}. Keep statistics in float32: convert the "
                "layer with .float()."
            )
    tracked = buffers.get("num_batches_tracked")
    if tracked is not None:
        tracked.fill_(count)
