"""Gathering the evidence: a few batches in evaluation, with the statistics of batches, recalibrated and in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normkit.batches import Forward, in_evaluation
from normkit.doctor.evidence.attribution import attribute, exchanged
from normkit.doctor.evidence.evidence import Evidence
from normkit.doctor.evidence.measure import Distance, Gap, Loss, LossFunction, kept_outputs
from normkit.doctor.evidence.observer import Observer, stores_batch_moments, training_moments
from normkit.doctor.evidence.over_ranks import (
    EXAMINE,
    alone,
    as_many_on_all,
    is_silent,
    largest_of,
    mean_gap,
    share_statistics,
    share_training,
    without_gradient_exchange,
)
from normkit.doctor.evidence.runs import Refusal, Runs, in_training
from normkit.doctor.evidence.source import smallest_batch, taken
from normkit.moments import Moments
from normkit.ranks import together
from normkit.snapshot import untouched
from normkit.surgery.norms import Survey, survey
from normkit.surgery.statistics.collect import own_statistics_back


def gather(
    model: nn.Module,
    batches: Iterable[Any],
    loss: LossFunction | None = None,
    optimizer: Optimizer | None = None,
    forward: Forward | None = None,
) -> Evidence:
    """Run the model on a few batches in each mode, and keep what rules read. The caller restores the model."""
    first = as_many_on_all(together(lambda: taken(batches), EXAMINE))
    found = survey(model)
    runs = Runs(model, first, forward)
    own_loss = None if loss is None else Loss(loss, model, runs.batches)
    evaluation, training, recalibrated = _Readings(own_loss), _Readings(own_loss), _Readings(own_loss)

    def observe() -> Evidence:
        with in_evaluation(model):  # first, and the model as it is: what fails here fails for the user too
            runs(evaluation)
        return _observed(found, runs, training)

    def measure(evidence: Evidence) -> tuple[Gap | None, dict[str, Moments]]:
        with in_evaluation(model), exchanged(evidence.exchangeable, evidence.population):
            runs(recalibrated)
        gap = _gap(training, evaluation, recalibrated) if recalibrated.outputs else None
        return gap, _in_training(evidence)

    with without_gradient_exchange(model):
        in_step = together if is_silent(model, found.norms) else alone
        evidence = in_step(observe, EXAMINE)
        evidence.smallest_batch, evidence.loss, evidence.optimizer = smallest_batch(batches), own_loss, optimizer
        share_statistics(evidence.statistics, evidence.by_name)
        own_gap, own_training = in_step(lambda: measure(evidence), EXAMINE)
        evidence.gap = mean_gap(own_gap, len(recalibrated.outputs))
        share_training(evidence.statistics, own_training)
        _share_out(evidence, recalibrated)
    return evidence


class _Readings:
    """The outputs of one pass over the batches and, if there is a loss, their losses."""

    def __init__(self, loss: Loss | None) -> None:
        self._loss = loss
        self.outputs: dict[int, list[Tensor]] = {}
        self.losses: dict[int, float] = {}

    def __call__(self, index: int, output: Any) -> None:
        self.outputs[index] = kept_outputs(output)
        if self._loss is not None:
            self.losses[index] = self._loss(index, output)

    @property
    def mean_loss(self) -> float:
        return sum(self.losses.values()) / max(len(self.losses), 1)

    def distance_from(self, other: _Readings) -> float:
        """The mean distance of the outputs from those of another pass."""
        measure = Distance(other.outputs)
        found = [measure(index, output) for index, output in self.outputs.items() if index in other.outputs]
        return sum(found) / max(len(found), 1)


def _observed(found: Survey, runs: Runs, readings: _Readings) -> Evidence:
    """Run with the statistics of batches, and see what norms are given."""
    observer = Observer(found.norms, runs)
    stored = [norm for norm in found.norms if stores_batch_moments(norm)]
    modes = {norm.name: norm.layer.training for norm in found.norms}
    with in_evaluation(runs.model), own_statistics_back(stored), observer.watching():
        runs(readings)
    return Evidence(runs.model, found.norms, found.unknown, modes, runs, observer.statistics, observer.given)


def _gap(training: _Readings, evaluation: _Readings, recalibrated: _Readings) -> Gap:
    """The measure in the three modes: the loss or, without one, the distance of outputs from those of training."""
    now, then = evaluation.distance_from(training), recalibrated.distance_from(training)
    if evaluation.losses:
        return Gap("loss", training.mean_loss, evaluation.mean_loss, recalibrated.mean_loss, now - then)
    return Gap("distance", 0.0, now, then, now - then)


def _in_training(evidence: Evidence) -> dict[str, Moments]:
    """What norms are given in training mode, dropout included, if the model runs in that."""
    runs = Runs(evidence.model, evidence.runs.batches, evidence.runs.forward)
    found: dict[str, Moments] = {}
    try:
        with untouched(evidence.model), in_training(evidence.model):
            found = training_moments(evidence.norms, runs)
    except Exception as error:  # detectors want targets in training, exported modules cannot train at all
        evidence.training_error = f"{type(error).__name__}: {error}"
    evidence.refusals = [_judged(evidence, refusal) for refusal in (*evidence.runs.refusals, *runs.refusals)]
    return found


def _judged(evidence: Evidence, refusal: Refusal) -> Refusal:
    """Torch's GroupNorm says of one value the same as its BatchNorm; which it was, the layer shows."""
    norm = evidence.by_name.get(refusal.layer)
    return refusal if norm is None or "N" in norm.spec.over else refusal._replace(is_within=True)


def _share_out(evidence: Evidence, recalibrated: _Readings) -> None:
    """Attribute a material gap to layers: by the loss, or by the squared distance from the recalibrated outputs.

    That is nothing once everything is exchanged, and the squares of independent errors add up.
    """
    if evidence.gap is None or not evidence.gap.is_material:
        return
    distances = largest_of({name: known.distance or 0.0 for name, known in evidence.statistics.items()})
    evidence.shares = attribute(
        evidence.runs,
        evidence.loss or Distance(recalibrated.outputs, power=2),
        evidence.exchangeable,
        evidence.population,
        distances.__getitem__,
    )
