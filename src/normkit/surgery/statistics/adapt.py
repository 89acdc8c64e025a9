"""Adapting a model to a shifted distribution, without labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from torch import nn

from normkit.batches import Forward, device_of, in_evaluation, repeatable
from normkit.errors import ArgumentError, NonFiniteError, did_you_mean
from normkit.moments import Moments, ema
from normkit.snapshot import Snapshot
from normkit.surgery.no_updates import uncompiled
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Surgery
from normkit.surgery.selection import Patterns
from normkit.surgery.statistics.collect import Batches, Progress, gather
from normkit.surgery.statistics.drift import Drift, drift
from normkit.surgery.statistics.predictions import Ballot, Collapse, Logits, Predictions, logits_of
from normkit.surgery.statistics.stored import (
    NOT_REACHED,
    NOTHING_STORED,
    WHAT,
    estimable,
    population_of,
    store,
    stored,
)
from normkit.surgery.statistics.tally import ALONE, group_of
from normkit.surgery.statistics.tent import EntropySteps, MakeOptimizer

AdaptMethod = Literal["adabn", "tent"]
ENTROPY_NOISE = 1e-3  # nats: a rise of the entropy by no more than this is rounding, not a failure


def adapt(
    model: nn.Module,
    batches: Iterable[Any],
    method: AdaptMethod = "adabn",
    forward: Forward | None = None,
    *,
    prior: float = 0.0,
    lr: float = 1e-3,
    epochs: int = 1,
    optimizer: MakeOptimizer | None = None,
    logits: Logits = "first",
    collapse: float = 0.5,
    max_drift: float | None = None,
    example: Any = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
    progress: Progress | None = None,
) -> Surgery:
    """Adapt the norms of a model to unlabeled batches of a shifted distribution, and roll back if that goes wrong.

    "adabn" (Li et al. 2016): statistics are estimated anew on the batches. With a `prior`, meant for few examples, they
    are averaged with the stored ones, mean with mean and variance with variance; the stored ones weigh
    prior / (prior + examples) (Schneider et al. 2020). "tent" (Wang et al. 2021): after that, steps on gamma and beta
    that lower the entropy of the predictions, with batch statistics and everything else in evaluation; then the
    statistics are estimated once more.

    The adaptation is rolled back, with nothing in `changed` and the reason with every layer in `skipped`, if
    - a statistic, a parameter or the entropy becomes NaN or infinite;
    - the entropy of the mean prediction falls below `collapse` times what it was, and fewer classes are predicted;
    - the steps of "tent" raise the entropy that they are to lower;
    - the statistics of a layer drift by more than `max_drift`.

    Args:
        model: a classifier; for "adabn", any model.
        batches: iterated over several times, so not an iterator.
        method: "adabn" or "tent".
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        prior: the number of examples that the stored statistics count as; 0 discards them.
        lr: learning rate of "tent".
        epochs: the number of passes of "tent" over the batches; one step per batch.
        optimizer: optimizer(parameters) makes the optimizer that replaces Adam.
        logits: gets the logits, (N, classes) or (N, classes, ...), from the output; "first" is its first tensor.
            None for outputs that are not predictions: only drift is watched then.
        collapse: see above; 0 switches this check off.
        max_drift: see above, in nats, the mean over channels; None sets no limit.
        example: a batch on which to measure how far the outputs move.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
        inplace: on the model itself instead of a copy.
        progress: called after each batch with the number of batches run so far.
    """
    check_options(method, prior, lr, collapse, epochs)
    each = Batches(repeatable(batches, "adapt"), forward, progress)
    with operation(model, inplace, only, skip) as op:
        before = op.trace(example, forward)
        start = Snapshot(op.model)
        found = op.survey()
        steps = EntropySteps(op.model, found.norms, lr, epochs, optimizer) if method == "tent" else None
        targets = estimable(op, found, steps.learned if steps else ())
        watch = _Watch(op.model, each, logits, collapse, max_drift, group_for(targets, method))
        adaptation = _Adaptation(op, targets, each, prior, watch, steps)
        try:
            adaptation.run(logits)
        except (Collapse, NonFiniteError) as reason:
            start.restore()
            for name in adaptation.names:
                op.skip(name, adaptation.what(name), f"rolled back: {reason}")
        return op.result(before, example, forward)


class _Watch:
    """What a model predicts, and how far it may move away from that."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        logits: Logits,
        collapse: float,
        max_drift: float | None,
        group: Any,
    ) -> None:
        self._model, self._batches, self._logits = model, batches, logits
        self._collapse, self._max_drift, self._group = collapse, max_drift, group

    def look(self) -> Predictions | None:
        """What the model predicts at this moment; None if its outputs are not predictions."""
        ballot = Ballot()

        def count(output: Any) -> None:
            found = logits_of(output, self._logits)
            if found is not None:
                ballot.add(found)

        with in_evaluation(self._model), uncompiled():
            self._batches.run(self._model, count)
        if self._group is not ALONE:  # so that all ranks decide alike
            ballot.merge_ranks(self._group, device_of(self._model))
        return ballot.predictions()

    def check(self, now: Predictions | None, *before: Predictions | None) -> None:
        """Raise if the predictions name far fewer classes than they did at their most varied."""
        known = [one for one in before if one is not None and math.isfinite(one.mean_entropy)]
        if now is not None:
            now.check(max(known, key=lambda one: one.mean_entropy, default=None), self._collapse)

    def check_drift(self, norm: Norm, moved: Drift) -> None:
        """Raise if a layer's statistics moved further than they may."""
        check_drift(norm, moved, self._max_drift)


class _Adaptation:
    """The original statistics of a model, its new ones, the steps on gamma and beta, and the record of all that."""

    def __init__(
        self,
        op: Operation,
        targets: Sequence[Norm],
        batches: Batches,
        prior: float,
        watch: _Watch,
        steps: EntropySteps | None,
    ) -> None:
        self._op, self._targets, self._batches = op, targets, batches
        self._prior, self._watch, self._steps = prior, watch, steps
        self._source = {norm.name: finite_if_used(norm, prior) for norm in targets}
        self._drift: dict[str, Drift] = {}
        self._learned = steps.learned if steps else {}
        self.names = list(dict.fromkeys([*self._source, *self._learned]))
        op.skipped[:] = [skipped for skipped in op.skipped if skipped.layer not in self._learned]

    def run(self, logits: Logits) -> None:
        """Adapt, check after every stage, and record what was done."""
        start = self._watch.look()
        self._estimate()
        now = adapted = self._watch.look()
        self._watch.check(adapted, start)
        if self._steps is not None:
            self._steps.take(self._targets, self._batches, logits)
            self._estimate()
            now = self._watch.look()
            self._watch.check(now, start, adapted)
            _check_lowered(adapted, now)
        self._note("" if start is None else f"; {start}, now {now}")

    def what(self, name: str) -> str:
        """What is done to a layer."""
        done = [WHAT] if name in self._source else []
        return ", ".join(done + (["gamma and beta stepped"] if name in self._learned else []))

    def _estimate(self) -> None:
        """Give the norms the statistics of the batches, averaged with their original ones by the prior."""
        if not self._targets:
            return
        tallies, count = gather(self._op.model, self._targets, self._batches)
        for norm in self._targets:
            if norm.name not in tallies:
                continue
            source, tally = self._source[norm.name], tallies[norm.name]
            new = mixed(source, population_of(norm, tally), tally.examples, self._prior)
            moved = self._drift[norm.name] = drift(source, new, norm.spec.eps or 0.0)
            self._watch.check_drift(norm, moved)
            store(norm, new, count)

    def _note(self, predictions: str) -> None:
        moved = self._steps.moved if self._steps else set()
        for name in self.names:
            if name in self._drift:
                self._op.change(name, self.what(name), f"{self._drift[name]}{predictions}")
            elif name in self._source:
                self._op.skip(name, self.what(name), NOT_REACHED)
            elif name in moved:
                self._op.change(name, self.what(name), f"{NOTHING_STORED}{predictions}")
            else:
                self._op.skip(name, self.what(name), "no gradient came to it")


def group_for(targets: Sequence[Norm], method: str) -> Any:
    """The processes that the batches are distributed over."""
    group = next((found for norm in targets if (found := group_of(norm)) is not ALONE), ALONE)
    if group is not ALONE and method == "tent":
        raise ArgumentError(
            'method "tent" steps on the batches of one process, so that processes would diverge. Adapt in one of them '
            'with convert(model, to="batch"), and send its state_dict to the others.'
        )
    return group


def finite_if_used(norm: Norm, prior: float) -> Moments:
    """What a norm stores; with a prior it must be finite."""
    source = stored(norm)
    if prior and not (source.mean.isfinite().all() and source.var.isfinite().all()):
        raise ArgumentError(f"{norm.title} stores NaN or infinity, which cannot be averaged with; use prior=0.")
    return source


def check_drift(norm: Norm, moved: Drift, most: float | None) -> None:
    """Raise `Collapse` if a layer's statistics moved further than they may."""
    if most is not None and moved.mean > most:
        raise Collapse(f"{norm.title}: {moved}; at most {most:g} was allowed.")


def mixed(source: Moments, target: Moments, examples: float, prior: float) -> Moments:
    """The average of both, weighted by examples; not the moments of the union, whose variance is larger than either."""
    wide = source._replace(mean=source.mean.to(target.mean), var=source.var.to(target.var))
    return ema(wide, target, examples / (prior + examples)) if prior else target


def _check_lowered(before: Predictions | None, now: Predictions | None) -> None:
    if before is not None and now is not None and now.entropy > before.entropy + ENTROPY_NOISE:
        raise Collapse(f"the steps that were to lower the entropy raised it, from {before} to {now}. Use a smaller lr.")


def check_options(method: str, prior: float, lr: float, collapse: float, epochs: int = 1) -> None:
    """Check what every form of adapting takes."""
    if method not in get_args(AdaptMethod):
        meant = did_you_mean(method, get_args(AdaptMethod))
        raise ArgumentError(f'method must be "adabn" or "tent"; got {method!r}.{meant}')
    for name, value, good in (
        ("prior", prior, 0 <= prior < math.inf),
        ("lr", lr, 0 < lr < math.inf),
        ("epochs", epochs, epochs >= 1),
        ("collapse", collapse, 0 <= collapse <= 1),
    ):
        if not good:
            bounds = {"prior": "0 examples or more", "lr": "positive", "epochs": "1 or more", "collapse": "in 0..1"}
            raise ArgumentError(f"{name} must be {bounds[name]}; got {value}.")
