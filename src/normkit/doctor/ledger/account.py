"""What the ledger keeps of one layer: bounded, however long the run is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from normkit.doctor.call_site import CallSite
from normkit.doctor.ledger.passes import Pass, Use, Window, Write
from normkit.doctor.ledger.statistics import Statistics, all_finite, running_statistics
from normkit.moments import Moments
from normkit.spec import NormSpec
from normkit.surgery.norms import stored_moments

_SAMPLES = 64  # batches of a layer whose moments are remembered
_LEARNING: tuple[Use, ...] = (
    "step",
    "other step",
    "discarded",
    "repeated",
    "untracked",
)  # forwards that are no evaluations


@dataclass
class Entry:
    """Writes to one layer's statistics from one line, with one use.

    Attributes:
        layer: the layer's name.
        use: what became of the forwards: see `normkit.doctor.ledger.passes.Use`.
        site: the line that called them, and the class of the module it called; None for writes that were not seen.
        is_training: the layer's mode.
        has_grad: whether gradients were enabled.
        count: how many writes.
        steps: in how many steps.
        first_step: the step of the first write; the first step is 0.
        last_step: that of the last.
        batch_sizes: the smallest and the largest batch; None if the model's inputs have no such dimension.
    """

    layer: str
    use: Use
    site: CallSite | None
    is_training: bool
    has_grad: bool
    count: int = 0
    steps: int = 0
    first_step: int = -1
    last_step: int = -1
    batch_sizes: tuple[int, int] | None = None

    def add(self, step: int, batch_size: int | None) -> None:
        """Count one more."""
        self.count += 1
        self.steps += step != self.last_step
        self.first_step = step if self.first_step < 0 else self.first_step
        self.last_step = step
        if batch_size is not None:
            low, high = self.batch_sizes or (batch_size, batch_size)
            self.batch_sizes = min(low, batch_size), max(high, batch_size)


@dataclass
class Tally:
    """Steps in which something happened.

    Attributes:
        steps: how many.
        first_step: the first.
        site: the line that did it there.
        most: the largest number of times in a step.
        apart: of a layer that is reused, the smallest distance of two of its inputs, in standard deviations.
    """

    steps: int = 0
    first_step: int = -1
    site: CallSite | None = None
    most: int = 0
    apart: float = math.inf

    def add(self, of: Pass, times: int) -> None:
        """Count one more step."""
        if not self.steps:
            self.first_step, self.site = of.step, of.site
        self.steps += 1
        self.most = max(self.most, times)


class Sample(NamedTuple):
    """The moments of a batch, of some channels, its size, and the line it came from."""

    moments: Moments
    batch_size: int | None
    site: CallSite | None


class Poison(NamedTuple):
    """What made statistics NaN or infinite.

    Attributes:
        step: when; -1 if they were so before the first watched step.
        of: the pass that did it; None if it was not seen.
        inputs: how many values of the model's inputs were NaN or infinite there.
    """

    step: int
    of: Pass | None = None
    inputs: int = 0


@dataclass
class Account:
    """One layer's part of the ledger.

    Attributes:
        name: the layer's name.
        layer: itself.
        spec: what it does, as it was when the ledger was opened; None if it is not a norm we know.
        parameters: those by which it counts as frozen.
        statistics: what it stores.
        start: the statistics at the beginning.
        entries: all writes that are settled.
        doubled: steps in which one batch wrote more than once, by cause: "recompute", "reused" or "repeated".
        accumulated: steps to which several batches have each brought a gradient.
        trained_steps: steps in which a forward that was no evaluation wrote.
        writes: the number of writes, without those of estimates.
        frozen_writes: those while all parameters were frozen.
        samples: the last batches that went into steps.
        poison: what made the statistics NaN or infinite.
    """

    name: str
    layer: nn.Module
    spec: NormSpec | None
    parameters: Sequence[nn.Parameter]
    statistics: Statistics = field(init=False)
    start: Moments | None = field(init=False)
    entries: dict[tuple[object, ...], Entry] = field(default_factory=dict)
    doubled: dict[str, Tally] = field(default_factory=dict)
    accumulated: Tally = field(default_factory=Tally)
    trained_steps: int = 0
    writes: int = 0
    frozen_writes: int = 0
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    poison: Poison | None = None
    _pending: list[Write] = field(default_factory=list)
    _awaits_check: bool = False

    def __post_init__(self) -> None:
        self.statistics = Statistics(self.layer, self.spec)
        stored = stored_moments(self.layer) if running_statistics(self.layer) else None  # a lazy layer has none yet
        self.start = None if stored is None else Moments(stored.mean.clone(), stored.var.clone(), 0)
        self.check_finite(-1, None)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it is trained now."""
        return bool(self.parameters) and not any(parameter.requires_grad for parameter in self.parameters)

    @property
    def is_unseen(self) -> bool:
        """Whether its statistics have moved in several steps, and no forward was seen to do it."""
        entries = self.entries.values()
        return all(entry.use == "unseen" for entry in entries) and sum(entry.steps for entry in entries) > 1

    # ---- while it runs

    def wrote(self, of: Pass, window: Window | None) -> Write:
        """Note that a forward has written the statistics."""
        write = Write(
            of=of,
            is_training=self.layer.training,
            has_grad=torch.is_grad_enabled(),
            is_frozen=self.is_frozen,
            is_estimate=self._averages() or (of.site is not None and of.site.is_normkits),
            window=window,
            batch=self.statistics.batch() if of.has_grad and not of.is_recompute else None,
            is_again=bool(self._pending) and self._pending[-1].of is of,
        )
        self.statistics.look()
        self._pending.append(write)
        if not self.statistics.is_on_cpu:
            self._awaits_check = True
        elif not write.is_estimate:
            self.check_finite(of.step, of)
        return write

    def _averages(self) -> bool:
        """Whether it averages over all batches, and did not when the ledger was opened."""
        return self.spec is not None and self.spec.momentum is not None and getattr(self.layer, "momentum", 0) is None

    def ran_again(self, output: object) -> None:
        """A backward repeats a forward: one that ran without a gradient gets it from here.

        So does the older kind of activation checkpointing, whose first forward is no evaluation.
        """
        first = next((write for write in self._pending if not write.has_grad and not write.needs_gradient), None)
        if first is not None:
            first.follow(output)

    def was_used_elsewhere(self) -> None:
        """Another optimizer has made a step."""
        for write in self._pending:
            write.is_used_elsewhere |= bool(write.tasks)

    @property
    def awaits_check(self) -> bool:
        """Whether it was written and not looked at since for NaN and infinity."""
        return self._awaits_check and self.poison is None

    def check_finite(self, step: int, of: Pass | None) -> None:
        """Take note of the first batch that makes the statistics NaN or infinite."""
        self._awaits_check = False
        if self.poison is None and not all_finite([self.layer]):
            self.poison = Poison(step, of, 0 if of is None else of.nonfinite_inputs())

    # ---- when a step has ended

    def settle(self, step: int, is_last: bool) -> None:
        """Decide what became of the writes. For those of this step a gradient may still come, and a step with it."""
        if self.statistics.has_moved():
            self._entry("unseen", None, self.layer.training, has_grad=True).add(step, None)
            self.statistics.look()
            self._awaits_check = True
        uses = [(write, write.use()) for write in self._pending]
        waits = [use is None and not is_last and write.of.step == step for write, use in uses]
        settled = [(write, use or write.last_use()) for (write, use), wait in zip(uses, waits, strict=True) if not wait]
        self._pending = [write for (write, _), wait in zip(uses, waits, strict=True) if wait]
        for write, use in settled:
            self._book(write, use)
        self._count_doubles(settled)
        self._count_accumulation([write for write, use in settled if use == "step"])

    def _book(self, write: Write, use: Use) -> None:
        self.writes += use != "estimate"
        self.frozen_writes += write.is_frozen and use != "estimate"
        self._entry(use, write.of.site, write.is_training, write.has_grad).add(write.of.step, write.of.batch_size)
        if use == "step" and write.batch is not None and not write.is_again:
            self.samples.append(Sample(write.batch, write.of.batch_size, write.of.site))

    def _entry(self, use: Use, site: CallSite | None, is_training: bool, has_grad: bool) -> Entry:
        key = (use, site, is_training, has_grad)
        return self.entries.setdefault(key, Entry(self.name, use, site, is_training, has_grad))

    def _count_doubles(self, settled: Sequence[tuple[Write, Use]]) -> None:
        """One batch, more than one write: by the same pass, by another one, or by one that a backward repeats."""
        learning = [write for write, use in settled if use in _LEARNING]
        self.trained_steps += bool(learning)
        by_pass: dict[int, list[Write]] = {}
        for write in learning:
            by_pass.setdefault(write.of.number, []).append(write)
        self._count("recompute", [write for write, use in settled if use == "recompute"])
        self._count_reuse(max(by_pass.values(), key=len, default=[]))
        self._count("repeated", [write for write in learning if self._repeats(write)])

    def _count(self, cause: str, extra: Sequence[Write]) -> None:
        if extra:
            self.doubled.setdefault(cause, Tally()).add(extra[0].of, 1 + len(extra))

    def _count_reuse(self, writes: Sequence[Write]) -> None:
        self._count("reused", writes[1:])
        batches = [write.batch for write in writes[:2] if write.batch is not None]
        if len(batches) == 2:
            tally = self.doubled["reused"]
            tally.apart = min(tally.apart, _apart(*batches))

    def _repeats(self, write: Write) -> bool:
        """Whether an earlier pass that learns had the same batch, and ran this layer."""
        other = write.of.repeats
        return other is not None and other.has_grad and self.name in other.visited and bool(write.tasks)

    def _count_accumulation(self, learned: Sequence[Write]) -> None:
        """Several batches, each with a backward of its own, before one step."""
        first = [write for write in learned if not self._repeats(write)]
        backwards = {task for write in first for task in write.tasks}
        batches = {write.of.number for write in first}
        if len(batches) > 1 and len(backwards) > 1:
            self.accumulated.add(first[0].of, len(batches))


def _apart(one: Moments, other: Moments) -> float:
    """How far two batches are apart: root mean square over channels, in standard deviations; the means or these."""
    alive = (one.var > 0) & (other.var > 0)
    if not alive.any():
        return 0.0
    spread, ratio = ((one.var + other.var)[alive] / 2).sqrt(), (one.var[alive] / other.var[alive]).log() / 2
    gap = (one.mean - other.mean)[alive] / spread
    return max(float(gap.square().mean().sqrt()), float(ratio.square().mean().sqrt()))


def frozen_by(layer: nn.Module, holder: nn.Module | None) -> list[nn.Parameter]:
    """The parameters by which a layer counts as frozen: its own or, if it has none, those of the module it is in."""
    own = list(layer.parameters())
    return own if own or holder is None else list(holder.parameters())
