"""What a stream keeps of its recent batches: averages of their statistics, and how varied their predictions were."""

from __future__ import annotations

import math
from typing import Any

import torch

from normkit.moments import Moments, ema
from normkit.surgery.norms import Norm
from normkit.surgery.statistics.adapt import check_drift, finite_if_used, mixed
from normkit.surgery.statistics.collect import has_variance
from normkit.surgery.statistics.drift import drift
from normkit.surgery.statistics.predictions import Ballot, Logits, Predictions, logits_of
from normkit.surgery.statistics.stored import as_stored, store
from normkit.surgery.statistics.tally import ALONE

REMEMBERED = 20  # windows until the most varied predictions of a stream have faded to 1/e


class RecentStatistics:
    """The statistics of a norm's recent inputs, as an exponential average over batches, beside its original ones."""

    def __init__(self, norm: Norm, momentum: float, prior: float, max_drift: float | None) -> None:
        self.norm = norm
        self._momentum, self._prior, self._max_drift = momentum, prior, max_drift
        self._source = finite_if_used(norm, prior)
        self._own = {name: None if b is None else b.detach().clone() for name, b in norm.layer._buffers.items()}
        self._recent: Moments | None = None
        self._examples, self._batches = 0.0, 0  # that the average weighs, and that it is over
        self._batch: tuple[Moments, int] | None = None

    def add(self, batch: Moments, examples: int) -> Moments | None:
        """Take the input of one more call into account; what to normalize it with, None if nothing is known yet.

        Of a shared norm, all calls on a batch count as one.
        """
        if self._batch is not None:
            batch, examples = self._batch[0].merge(batch), self._batch[1] + examples
        self._batch = batch, examples
        return self._now()

    def settle(self) -> None:
        """Keep what the batch has added, in the average and in the model."""
        found, self._batch = self._after_batch(), None
        if found is None:
            return
        self._recent, self._examples = found
        self._batches += 1
        store(self.norm, self._blend(*found), self._batches)

    def forget_batch(self) -> None:
        """Leave the average as it was before the batch."""
        self._batch = None

    @torch.no_grad()
    def reset(self) -> None:
        """Give the norm its original statistics back, bit for bit, and forget all batches."""
        self._recent, self._batch, self._examples, self._batches = None, None, 0.0, 0
        for name, own in self._own.items():
            buffer = self.norm.layer._buffers[name]
            if own is not None and buffer is not None:
                buffer.copy_(own)

    def _now(self) -> Moments | None:
        found = self._after_batch()
        if found is None:
            return None if self._recent is None else self._blend(self._recent, self._examples)
        new = self._blend(*found)
        if self._max_drift is not None:
            check_drift(self.norm, drift(self._source, new, self.norm.spec.eps or 0.0), self._max_drift)
        return new

    def _after_batch(self) -> tuple[Moments, float] | None:
        """The average with the batch, and the examples that it weighs; None for a batch that has no variance."""
        if self._batch is None or not has_variance(self._batch[0]):
            return None
        batch, examples = self._batch
        new = as_stored(self.norm, batch._replace(var=batch.unbiased_var))
        weight = (1 - self._momentum) * self._examples + examples
        return new if self._recent is None else ema(self._recent, new, examples / weight), weight

    def _blend(self, recent: Moments, examples: float) -> Moments:
        return mixed(self._source, recent, examples, self._prior)


class RecentPredictions:
    """The recent predictions of a stream, and how varied they were at their most varied."""

    def __init__(self, logits: Logits, collapse: float, window: int, group: Any, device: torch.device | None) -> None:
        self._logits, self._collapse, self._window = logits, collapse, window
        self._group, self._device = group, device
        self._varied: Predictions | None = None
        self.restart()

    def restart(self) -> None:
        """Forget recent predictions, but not how varied they were: a model that was reset can collapse at once."""
        self._recent = Ballot()

    def forget(self) -> None:
        """Forget everything."""
        self._varied = None
        self.restart()

    def check(self, output: Any) -> None:
        """Raise `Collapse` if the predictions of a batch, together with recent ones, show one."""
        found = logits_of(output, self._logits)
        if found is None:
            return
        ballot = Ballot()
        ballot.add(found)
        if self._group is not ALONE:  # so that all ranks decide alike
            ballot.merge_ranks(self._group, self._device)
        self._fade(ballot.examples)
        self._recent.join(ballot)
        now = self._recent.predictions()
        if now is None:
            return
        is_enough = self._recent.examples >= self._window / 2  # before that, few classes may be chance
        now.check(self._varied if is_enough else None, self._collapse)
        if self._varied is None or now.mean_entropy > self._varied.mean_entropy:
            self._varied = now

    def _fade(self, examples: float) -> None:
        self._recent.fade(math.exp(-examples / self._window))
        if self._varied is not None:
            share = math.exp(-examples / (REMEMBERED * self._window))
            self._varied = self._varied.faded(share)
