"""Adapting a model to a stream of batches: one pass, a prediction for each batch, and nothing that grows."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normkit.batches import Forward, device_of, feed, in_evaluation, map_leaves
from normkit.errors import ArgumentError, NonFiniteError, NormkitWarning
from normkit.surgery.no_updates import uncompiled
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Change
from normkit.surgery.selection import Patterns
from normkit.surgery.statistics.adapt import AdaptMethod, check_options, group_for
from normkit.surgery.statistics.collect import as_if_stored, finite_moments, numbered, own_statistics_back, showing
from normkit.surgery.statistics.predictions import Collapse, Logits
from normkit.surgery.statistics.recent import RecentPredictions, RecentStatistics
from normkit.surgery.statistics.stored import estimable
from normkit.surgery.statistics.tent import EntropySteps, MakeOptimizer

KEPT_RESETS = 100  # the latest; a stream may have no end


def adapt_stream(
    model: nn.Module,
    method: AdaptMethod = "adabn",
    forward: Forward | None = None,
    *,
    momentum: float = 0.1,
    prior: float = 0.0,
    lr: float = 1e-3,
    optimizer: MakeOptimizer | None = None,
    logits: Logits = "first",
    collapse: float = 0.5,
    window: int = 256,
    max_drift: float | None = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
) -> AdaptedStream:
    """Adapt the norms of a model to batches as they come, each seen once, and predict them: `y = stream(batch)`.

    Norms use an exponential average of the statistics of recent batches, this one included. With a `prior` it is
    averaged with the stored statistics as by `adapt`: of n recent examples, the stored ones weigh prior / (prior + n).
    "tent" takes a step on gamma and beta after each batch, which lowers the entropy of its predictions, with these
    statistics held fixed. Everything else is in evaluation.

    The model is reset to what it was, with a warning and a record in `stream.resets`, if

    - a statistic, a parameter or a prediction becomes NaN or infinite;
    - the entropy of the mean prediction falls below `collapse` times what it was at its highest, and fewer classes are
      predicted; over some 20 windows that highest value is forgotten;
    - the statistics of a layer drift by more than `max_drift`.

    The batch that showed it is predicted by the model as it was.

    Args:
        model: a classifier; for "adabn", any model.
        method: "adabn" or "tent".
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        momentum: the weight of a new batch in the average, once that has gone on for 1 / momentum batches. Batches
            weigh by their examples; the first counts in full.
        prior: the number of examples that the stored statistics count as; 0 discards them.
        lr: learning rate of "tent".
        optimizer: optimizer(parameters) makes the optimizer that replaces Adam.
        logits: gets the logits, (N, classes) or (N, classes, ...), from the output; "first" is its first tensor.
            None for outputs that are not predictions: only drift is watched then.
        collapse: see above; 0 switches this check off.
        window: the number of recent predictions whose entropy is watched.
        max_drift: see above, in nats, the mean over channels; None sets no limit.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
        inplace: on the model itself instead of a copy.
    """
    check_options(method, prior, lr, collapse)
    _check(momentum, window)
    with operation(model, inplace, only, skip) as op:
        found = op.survey()
        steps = EntropySteps(op.model, found.norms, lr, 1, optimizer) if method == "tent" else None
        targets = estimable(op, found, steps.learned if steps else ())
        if not targets and steps is None:
            raise ArgumentError(
                "adapt_stream needs norms that store the statistics of batches; this model has none to be adapted."
            )
        watch = RecentPredictions(logits, collapse, window, group_for(targets, method), device_of(op.model))
        averages = [RecentStatistics(norm, momentum, prior, max_drift) for norm in targets]
        learned = steps.learned if steps else {}
        op.skipped[:] = [skipped for skipped in op.skipped if skipped.layer not in learned]
        stream = AdaptedStream(op, averages, watch, steps, forward, logits)
        op.result()
        return stream


class Reset(NamedTuple):
    """The batch that showed that the adaptation had gone wrong, the first being 0, and how."""

    batch: int
    why: str


class AdaptedStream:
    """A model that adapts to each batch it predicts: `y = stream(batch)`.

    Between calls there is nothing to close: no hook is left on the model, and its modes are its own.

    Attributes:
        model: the adapted model, to be evaluated or saved like any other.
        batches: the number of batches so far.
        resets: the latest batches at which the model was reset, and why.
        skipped: norms that are not adapted, and why.
    """

    def __init__(
        self,
        op: Operation,
        averages: Sequence[RecentStatistics],
        watch: RecentPredictions,
        steps: EntropySteps | None,
        forward: Forward | None,
        logits: Logits,
    ) -> None:
        self.model = op.model
        self.batches = 0
        self.resets: deque[Reset] = deque(maxlen=KEPT_RESETS)
        self.skipped: Sequence[Change] = op.skipped
        self._undo = op.undo
        self._averages = {average.norm.name: average for average in averages}
        self._watch, self._forward = watch, forward
        self._steps = None if steps is None else _Steps(steps, logits)

    def __call__(self, batch: Any) -> Any:
        """Adapt to a batch, and return what the model says of it, without a gradient."""
        with numbered(self.batches), in_evaluation(self.model), uncompiled():
            output = self._predicted(batch)
        self.batches += 1
        return output

    def reset(self) -> None:
        """Make the model what it was, and begin anew with the next batch."""
        self._reset()
        self._watch.forget()

    def undo(self) -> nn.Module:
        """Give back the model as it was before the stream, bit for bit; in place, the same model restored."""
        self.reset()
        return self._undo()

    def _reset(self) -> None:
        for average in self._averages.values():
            average.reset()
        if self._steps is not None:
            self._steps.reset()
        self._watch.restart()

    def _predicted(self, batch: Any) -> Any:
        try:
            return self._adapted(batch)
        except (Collapse, NonFiniteError) as reason:
            self._reset()
            self.resets.append(Reset(self.batches, str(reason)))
            warnings.warn(f"batch {self.batches}: the model was reset: {reason}", NormkitWarning, stacklevel=3)
            return feed(self.model, batch, self._forward)

    def _adapted(self, batch: Any) -> Any:
        norms = [average.norm for average in self._averages.values()]
        learning = nullcontext() if self._steps is None else self._steps.learning()
        with self._unless_it_fails(), own_statistics_back(norms), learning:
            with showing(norms, self._take):
                output = feed(self.model, batch, self._forward)
            self._watch.check(output)
            if self._steps is not None:
                self._steps.take(output)
        for average in self._averages.values():
            average.settle()
        return map_leaves(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def _take(self, norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        new = self._averages[norm.name].add(*finite_moments(norm, x, mask))
        if new is not None:
            as_if_stored(norm.layer, new)

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Forget what a batch has added if the model cannot run on it."""
        try:
            yield
        except BaseException:
            for average in self._averages.values():
                average.forget_batch()
            raise


class _Steps:
    """The entropy steps of a stream: one optimizer, and the gammas and betas to begin anew with."""

    def __init__(self, steps: EntropySteps, logits: Logits) -> None:
        self._steps, self._logits = steps, logits
        self._source = [p.detach().clone() for p in steps.parameters]
        self._optimizer: Optimizer | None = None
        self.learning = steps.learning

    def take(self, output: Any) -> None:
        """Take a step on the predictions of a batch; one that fails leaves gamma and beta as they were."""
        before = [p.detach().clone() for p in self._steps.parameters]
        try:
            self._optimizer = self._optimizer or self._steps.optimizer()
            self._steps.step(self._optimizer, output, self._logits)
            self._steps.check()
        except BaseException:
            self._put_back(before)
            raise

    def reset(self) -> None:
        """Give the layers their original gammas and betas back, bit for bit, and forget the optimizer."""
        self._optimizer = None
        self._put_back(self._source)

    @torch.no_grad()
    def _put_back(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self._steps.parameters, values, strict=True):
            p.copy_(value)


def _check(momentum: float, window: int) -> None:
    if not 0 < momentum <= 1:
        raise ArgumentError(
            f"momentum must lie above 0 and be 1 at most; got {momentum}. It weights the new batch: 1 forgets others."
        )
    if not isinstance(window, int) or window < 1:
        raise ArgumentError(f"window must be 1 prediction or more, a whole number; got {window}.")
