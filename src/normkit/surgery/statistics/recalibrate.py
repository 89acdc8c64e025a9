"""Population statistics for the norms of a model (Ioffe & Szegedy 2015, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from torch import nn

from normkit.batches import Forward, repeatable
from normkit.errors import ArgumentError
from normkit.moments import PopulationMethod
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Surgery
from normkit.surgery.selection import Patterns
from normkit.surgery.statistics.collect import Batches, Progress, gather, gather_last, visits
from normkit.surgery.statistics.drift import drift
from normkit.surgery.statistics.stored import NOT_REACHED, WHAT, estimable, population_of, store, stored
from normkit.surgery.statistics.tally import Tally


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    method: PopulationMethod = "pooled",
    exact: bool = False,
    example: Any = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
    progress: Progress | None = None,
) -> Surgery:
    """Replace the stored statistics of a model's norms by those of their inputs on these batches.

    Norms normalize with the statistics of each batch, as in training; everything else runs as in evaluation. All
    layers get their modes back afterwards, and `num_batches_tracked` is the number of batches.

    Args:
        model: any model, also one of averaged weights (EMA, SWA).
        batches: iterated over once; with `exact`, once for every norm and once more.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        method: "pooled": mean and unbiased variance over all values of all batches, whatever their sizes. "paper":
            Algorithm 2, the plain averages of the batches' means and unbiased variances.
        exact: layer by layer, in the order they run: the statistics of each norm are taken with all norms before it in
            evaluation, with their new statistics, which is the input it will have from then on.
        example: a batch on which to measure how far the outputs move.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
        inplace: on the model itself instead of a copy.
        progress: called after each batch with the number of batches run so far.
    """
    if method not in get_args(PopulationMethod):
        raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
    each = Batches(repeatable(batches, "recalibrate(exact=True)") if exact else batches, forward, progress)
    with operation(model, inplace, only, skip) as op:
        before = op.trace(example, forward)
        targets = estimable(op, op.survey())
        if not targets:
            each.check()
        elif exact:
            _one_by_one(op, targets, each, method)
        else:
            tallies, count = gather(op.model, targets, each, method)
            for norm in targets:
                _settle(op, norm, tallies.get(norm.name), count, method)
        return op.result(before, example, forward)


def _one_by_one(op: Operation, targets: Sequence[Norm], batches: Batches, method: PopulationMethod) -> None:
    """Estimate each norm after those before it; one that runs several times in a forward uses batch statistics."""
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


def _settle(op: Operation, norm: Norm, tally: Tally | None, count: int, method: PopulationMethod) -> None:
    """Store what was found, and record it."""
    if tally is None:
        op.skip(norm.name, WHAT, NOT_REACHED)
        return
    old, new = stored(norm), population_of(norm, tally)
    store(norm, new, count)
    how = "over all values" if method == "pooled" else "averages of batches"
    moved = drift(old, new, norm.spec.eps or 0.0)
    op.change(norm.name, WHAT, f"{how} of {count} batches, {tally.values:,} per channel; {moved}")
