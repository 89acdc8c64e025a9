"""Gathering the evidence: a few batches in evaluation, with the statistics of batches, recalibrated and in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normkit.batches import Forward, in_evaluation
from normkit.doctor.evidence.attribution import attribute, exchanged, mean_reading
from normkit.doctor.evidence.evidence import Evidence
from normkit.doctor.evidence.measure import Distance, Gap, Loss, LossFunction, Measure, kept_outputs
from normkit.doctor.evidence.observer import Observer, stores_batch_moments, training_moments
from normkit.doctor.evidence.runs import Refusal, Runs, in_training
from normkit.doctor.evidence.source import smallest_batch, taken
from normkit.moments import Moments
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
    found = survey(model)
    runs = Runs(model, taken(batches), forward)
    with in_evaluation(model):  # the model as it is: what fails here fails for the user too
        evaluation = _Readings(runs, loss)
        runs(evaluation)
    evidence, training = _observed(found, runs)
    evidence.smallest_batch, evidence.loss, evidence.optimizer = smallest_batch(batches), evaluation.loss, optimizer
    _measure_gap(evidence, training, evaluation)
    _in_training(evidence)
    _share_out(evidence, evaluation)
    return evidence


class _Readings:
    """The outputs of one pass, or their losses."""

    def __init__(self, runs: Runs, loss: LossFunction | None) -> None:
        self.loss = None if loss is None else Loss(loss, runs.model, runs.batches)
        self.outputs: dict[int, list[Tensor]] = {}
        self.losses: dict[int, float] = {}

    def __call__(self, index: int, output: Any) -> None:
        if self.loss is None:
            self.outputs[index] = kept_outputs(output)
        else:
            self.losses[index] = self.loss(index, output)


def _observed(found: Survey, runs: Runs) -> tuple[Evidence, dict[int, Any]]:
    """Run with the statistics of batches, and see what norms are given; also returns the outputs."""
    observer = Observer(found.norms, runs)
    stored = [norm for norm in found.norms if stores_batch_moments(norm)]
    modes = {norm.name: norm.layer.training for norm in found.norms}
    outputs: dict[int, Any] = {}
    with in_evaluation(runs.model), own_statistics_back(stored), observer.watching():
        runs(outputs.__setitem__)
    evidence = Evidence(runs.model, found.norms, found.unknown, modes, runs, observer.statistics, observer.given)
    return evidence, outputs


def _measure_gap(evidence: Evidence, outputs: dict[int, Any], evaluation: _Readings) -> None:
    """The measure in training, evaluation and recalibrated mode; `outputs` are those of training."""
    if not outputs:
        return
    measure: Measure = evaluation.loss or Distance({index: kept_outputs(out) for index, out in outputs.items()})
    training = _mean([measure(index, output) for index, output in outputs.items()])
    known = evaluation.losses or {i: measure(i, output) for i, output in evaluation.outputs.items() if i in outputs}
    with exchanged(evidence.exchangeable, evidence.population):
        recalibrated = mean_reading(evidence.runs, measure)
    evidence.gap = Gap(measure.name, training, _mean(list(known.values())), recalibrated)


def _mean(readings: list[float]) -> float:
    return sum(readings) / max(len(readings), 1)


def _in_training(evidence: Evidence) -> None:
    """What norms are given in training mode, dropout included, if the model runs in that."""
    runs = Runs(evidence.model, evidence.runs.batches, evidence.runs.forward)
    found: dict[str, Moments] = {}
    try:
        with untouched(evidence.model), in_training(evidence.model):
            found = training_moments(evidence.norms, runs)
    except Exception as error:  # detectors want targets in training, exported modules cannot train at all
        evidence.training_error = f"{type(error).__name__}: {error}"
    evidence.refusals = [_judged(evidence, refusal) for refusal in (*evidence.runs.refusals, *runs.refusals)]
    for name, moments in found.items():
        if name in evidence.statistics:
            evidence.statistics[name].training = moments


def _judged(evidence: Evidence, refusal: Refusal) -> Refusal:
    """Torch's GroupNorm says of one value the same as its BatchNorm; which it was, the layer shows."""
    norm = evidence.by_name.get(refusal.layer)
    return refusal if norm is None or "N" in norm.spec.over else refusal._replace(is_within=True)


def _share_out(evidence: Evidence, evaluation: _Readings) -> None:
    """Attribute a material gap to layers."""
    if evidence.gap is None or not evidence.gap.is_material:
        return
    measure: Measure
    if evaluation.loss is not None:
        measure = evaluation.loss
    else:  # the distance from the recalibrated outputs, which is nothing once everything is exchanged
        outputs: dict[int, list[Tensor]] = {}
        with exchanged(evidence.exchangeable, evidence.population), in_evaluation(evidence.model):
            evidence.runs(lambda index, output: outputs.__setitem__(index, kept_outputs(output)))
        measure = Distance(outputs, power=2)  # squares of independent errors add up
    statistics = evidence.statistics
    evidence.shares = attribute(
        evidence.runs,
        measure,
        evidence.exchangeable,
        evidence.population,
        lambda name: statistics[name].distance or 0.0,
    )
