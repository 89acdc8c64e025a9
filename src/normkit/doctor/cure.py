"""The remedies that are safe, applied one after another, each measured before and after.

Safe is what leaves the function of evaluation as it is or makes it measurably better, keeps the keys of the state_dict
and can be undone: statistics taken from the data again, a momentum turned round, modes and freezes made to agree with
requires_grad. What needs a decision, another architecture, another loader or another optimizer is skipped, with the
finding's own remedy as the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from normkit.batches import in_evaluation
from normkit.doctor.evidence.attribution import mean_reading
from normkit.doctor.evidence.measure import Distance, Loss, Measure, kept_outputs
from normkit.doctor.evidence.runs import Runs
from normkit.errors import NormkitError
from normkit.figures.values import cell_text
from normkit.finding import Finding
from normkit.named_layers import named_layers
from normkit.snapshot import Snapshot, untouched
from normkit.surgery.check_export.batch_mates import batch_size
from normkit.surgery.no_updates import no_updates
from normkit.surgery.norms import norms
from normkit.surgery.operation import Operation, operation
from normkit.surgery.replace.freeze import freeze
from normkit.surgery.result import Change, Surgery
from normkit.surgery.statistics.recalibrate import recalibrate

if TYPE_CHECKING:
    from normkit.doctor.diagnosis import Diagnosis, Patient

_ROUNDING = 1e-6  # of the measure: a remedy that moves it by no more has not made it worse


class Step(NamedTuple):
    """A remedy that was tried.

    Attributes:
        codes: of the findings it is for.
        what: what was done.
        before: the measure in evaluation before it; None if it could not be taken.
        after: the same after it.
        is_kept: whether it stays. What made the measure worse, or could not be done, was taken back.
    """

    codes: tuple[str, ...]
    what: str
    before: float | None
    after: float | None
    is_kept: bool

    def __str__(self) -> str:
        moved = "" if self.before is None else f": {cell_text(self.before)} before, {cell_text(self.after)} after"
        return f"{', '.join(self.codes)}: {self.what}{moved}{'' if self.is_kept else ', taken back'}"


@dataclass(frozen=True)
class Cure(Surgery):
    """The result of `Diagnosis.cure`.

    Attributes:
        steps: the remedies in the order in which they were tried.
        measure: what was measured around each: "loss", or "distance" of outputs from those with batch statistics.
    """

    steps: Sequence[Step] = ()
    measure: str = "loss"

    def __str__(self) -> str:
        shown = [f"{step}" for step in self.steps] or ["no finding has a remedy that is safe to apply"]
        head = f"{self.measure} in evaluation, remedy by remedy:"
        return "\n".join([head, *(f"  {each}" for each in shown), super().__str__()])


class Remedy(NamedTuple):
    """Something safe to do about findings of some codes, which changes a model in place and says what it changed."""

    codes: tuple[str, ...]
    what: str
    apply: Callable[[nn.Module, Sequence[Finding], Patient], Sequence[Change]]


def cure(diagnosis: Diagnosis, inplace: bool = False) -> Cure:
    """Apply the safe remedies of a diagnosis's findings to its model, or to a copy."""
    patient = _without_singles(diagnosis.patient)
    measured = _measure(patient)
    with operation(patient.model, inplace) as op:
        steps = []
        for remedy in REMEDIES:
            found = [finding for finding in diagnosis.findings if finding.code in remedy.codes]
            if found:
                steps.append(_tried(op, remedy, found, patient, measured))
        for finding in diagnosis.findings:
            if not any(finding.code in remedy.codes for remedy in REMEDIES):
                op.skip(finding.layer or "", f"{finding.code} {finding.name}", finding.remedy)
        done = op.result()
    name = "distance" if patient.loss is None else "loss"
    return Cure(done.model, done.changed, done.skipped, done.parity, done._undo, steps, name)


def _without_singles(patient: Patient) -> Patient:
    """Without the batches of one example, such as the last of a loader: they have no statistics of their own."""
    kept = [batch for batch in patient.batches if batch_size(batch) != 1]
    return replace(patient, batches=kept or patient.batches)


def _tried(
    op: Operation,
    remedy: Remedy,
    found: Sequence[Finding],
    patient: Patient,
    measured: Callable[[nn.Module], float] | None,
) -> Step:
    """Apply a remedy; take it back if it fails or makes the measure worse."""
    codes = tuple(dict.fromkeys(finding.code for finding in found))
    before = None if measured is None else measured(op.model)
    snapshot, why, after = Snapshot(op.model), "", before
    changes: Sequence[Change] = ()
    try:
        changes = remedy.apply(op.model, found, patient)
        after = before if measured is None else measured(op.model)
        why = _worse(before, after)
    except NormkitError as error:
        why = str(error)
    if why:
        snapshot.restore()
        changes = ()
    done = {change.layer for change in changes}
    op.changed.extend(change._replace(why=_reason(codes, change.why)) for change in changes)
    for finding in found:
        if finding.layer not in done:
            op.skip(finding.layer or "", f"{finding.code} {finding.name}", why or finding.remedy)
    return Step(codes, remedy.what, before, after, is_kept=bool(changes))


def _reason(codes: tuple[str, ...], why: str) -> str:
    return f"{', '.join(codes)}{'; ' if why else ''}{why}"


def _worse(before: float | None, after: float | None) -> str:
    """Why a remedy is taken back; empty if it is not."""
    if before is None or after is None or math.isnan(before):
        return ""
    if math.isnan(after) or after > before + _ROUNDING * abs(before):
        return f"it made the measure worse: {cell_text(before)} before, {cell_text(after)} after"
    return ""


# ---- the measure


def _measure(patient: Patient) -> Callable[[nn.Module], float] | None:
    """The mean over the batches, in evaluation; None without outputs with batch statistics to compare with."""
    judge: Measure
    if patient.loss is None:
        reference = _reference(patient)
        judge, which = Distance(reference), list(reference)
    else:
        judge, which = Loss(patient.loss, patient.model, patient.batches), list(range(len(patient.batches)))
    if not which:
        return None

    def measured(model: nn.Module) -> float:
        with untouched(model):
            return mean_reading(Runs(model, patient.batches, patient.forward), judge, which)

    return measured


def _reference(patient: Patient) -> dict[int, list[Tensor]]:
    """The outputs with the statistics of each batch in the norms, and everything else as in evaluation."""
    model, outputs = patient.model, dict[int, list[Tensor]]()
    with untouched(model), in_evaluation(model), no_updates(model):
        for norm in norms(model):
            norm.layer.training = True
        runs = Runs(model, patient.batches, patient.forward)
        runs(lambda index, output: outputs.__setitem__(index, kept_outputs(output)))
    return outputs


# ---- the remedies


def _recalibrated(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """All statistics: those of the layers behind a wrong one were taken from what it put out."""
    return recalibrate(model, patient.batches, patient.forward, inplace=True).changed


def _momentum_turned(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """A momentum of 0.9, which elsewhere weights the old value, as the 0.1 that is meant."""
    changes = []
    for name, layer in _layers_of(model, found):
        momentum: Any = getattr(layer, "momentum", None)
        if isinstance(momentum, float) and 0.5 < momentum < 1:
            turned = float(f"{1 - momentum:.6g}")
            vars(layer)["momentum"] = turned
            changes.append(Change(name, f"momentum {momentum:g} to {turned:g}", "it weights the new value"))
    return changes


def _freeze_completed(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """A frozen norm that trains is frozen whole; one that learns, in evaluation, trains as the model does."""
    changes: list[Change] = []
    for name, layer in _layers_of(model, found):
        if layer.training:
            changes += [change._replace(layer=name) for change in freeze(layer, inplace=True).changed]
        elif model.training and any(parameter.requires_grad for parameter in layer.parameters()):
            layer.train()
            changes.append(Change(name, "put into training mode", "as the model is: its gamma and beta learn"))
    return changes


def _layers_of(model: nn.Module, found: Sequence[Finding]) -> Iterator[tuple[str, nn.Module]]:
    layers = dict(named_layers(model))
    for name in dict.fromkeys(finding.layer for finding in found):
        if name is not None and name in layers:
            yield name, layers[name]


# In this order: a freeze keeps the statistics that were put right before it. A momentum of 0.9 has left those of the
# last batch, so that they are taken again, too.
REMEDIES = (
    Remedy(("NK101", "NK102", "NK103", "NK104"), "statistics taken from the batches again", _recalibrated),
    Remedy(("NK104",), "momentum turned round", _momentum_turned),
    Remedy(("NK202", "NK203"), "freeze completed", _freeze_completed),
)
