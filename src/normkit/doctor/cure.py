"""The remedies that are safe, applied one after another, each measured before and after.

Safe is what leaves the function of evaluation as it is or makes it measurably better, keeps the keys of the state_dict
and can be undone: statistics taken from the data again, a momentum turned round, modes and freezes made to agree with
requires_grad. What needs a decision, another architecture, another loader or another optimizer is skipped, with the
finding's own remedy as the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from normkit.batches import in_evaluation
from normkit.doctor.evidence.attribution import mean_reading
from normkit.doctor.evidence.measure import Distance, Loss, Measure, kept_outputs
from normkit.doctor.evidence.runs import Runs
from normkit.doctor.remedies import REMEDIES, Remedy
from normkit.errors import NormkitError
from normkit.figures.values import cell_text
from normkit.finding import Finding
from normkit.snapshot import Snapshot, untouched
from normkit.surgery.check_export.batch_mates import batch_size
from normkit.surgery.no_updates import no_updates
from normkit.surgery.norms import norms
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Change, Surgery

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


def cure(diagnosis: Diagnosis, inplace: bool = False) -> Cure:
    """Apply the safe remedies of a diagnosis's findings to its model, or to a copy."""
    patient = _without_singles(diagnosis.patient)
    measured = _measure(patient)
    with operation(patient.model, inplace) as op:
        work = _Work(op, patient, measured)
        for remedy in REMEDIES:
            found = [finding for finding in diagnosis.findings if finding.code in remedy.codes]
            if found:
                work.attempt(remedy, found)
        for finding in diagnosis.findings:
            if finding not in work.cured:
                why = next((reason for of, reason in work.failed if of is finding), finding.remedy)
                op.skip(finding.layer or "", f"{finding.code} {finding.name}", why)
        done = op.result()
    name = "distance" if patient.loss is None else "loss"
    return Cure(done.model, done.changed, done.skipped, done.parity, done._undo, work.steps, name)


def _without_singles(patient: Patient) -> Patient:
    """Without the batches of one example, such as the last of a loader: they have no statistics of their own."""
    kept = [batch for batch in patient.batches if batch_size(batch) != 1]
    return replace(patient, batches=kept or patient.batches)


class _Work:
    """Remedies tried on a model, and the measure as it stands.

    Attributes:
        steps: the remedies that had something to do.
        cured: the findings that one of them was for.
        failed: findings with why a remedy for them was taken back.
    """

    def __init__(self, op: Operation, patient: Patient, measured: Callable[[nn.Module], float] | None) -> None:
        self._op, self._patient, self._measured = op, patient, measured
        self._first = self._level = None if measured is None else measured(op.model)
        self.steps: list[Step] = []
        self.cured: list[Finding] = []
        self.failed: list[tuple[Finding, str]] = []

    def attempt(self, remedy: Remedy, found: Sequence[Finding]) -> None:
        """Apply a remedy; take it back if it fails, or is not worth keeping."""
        model, snapshot, after = self._op.model, Snapshot(self._op.model), self._level
        try:
            changes = remedy.apply(model, found, self._patient)
            after = None if self._measured is None or not changes else self._measured(model)
            why = self._objection(remedy, after) if changes else ""
        except NormkitError as error:
            changes, why = [], str(error)
            if any(why == reason for _, reason in self.failed):  # an earlier remedy has failed in the same way
                snapshot.restore()
                return
        if why or not changes:
            snapshot.restore()
        if why:
            self.failed += [(finding, why) for finding in found]
        if why or changes:
            codes = tuple(dict.fromkeys(finding.code for finding in found))
            self.steps.append(Step(codes, remedy.what, self._level, after, is_kept=not why))
            if not why:
                self._keep(changes, codes, found, after)

    def _keep(
        self, changes: Sequence[Change], codes: tuple[str, ...], found: Sequence[Finding], level: float | None
    ) -> None:
        names = {change.layer for change in changes}
        known = {(change.layer, change.what) for change in self._op.changed}
        new = [change for change in changes if (change.layer, change.what) not in known]
        self._op.changed += [each._replace(why="; ".join(filter(None, [", ".join(codes), each.why]))) for each in new]
        self.cured += [finding for finding in found if finding.layer in names]
        self._level = level

    def _objection(self, remedy: Remedy, after: float | None) -> str:
        """Why a remedy is taken back; empty if it is not."""
        first, before = self._first, self._level
        if first is None or before is None or after is None:
            return "what it gains cannot be measured" if remedy.least_gain else ""
        moved = f"{cell_text(before)} before, {cell_text(after)} after"
        if (math.isnan(after) and not math.isnan(before)) or after > before + _ROUNDING * abs(before):
            return f"it made the measure worse: {moved}"
        if remedy.least_gain and not before - after > remedy.least_gain * (first - after):
            return f"it gains too little: {moved}"
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
