from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normkit.batches import Forward, in_evaluation
from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.mates import couplings
from normkit.doctor.evidence.runs import in_own_evaluation
from normkit.doctor.evidence.wiring import is_functional_norm, uses_batch_statistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.snapshot import untouched
from normkit.spec import describe
from normkit.surgery.fold.dataflow import Event, record
from normkit.surgery.norms import Norm

_REDUCTIONS = frozenset({"mean", "var", "var_mean", "std", "std_mean", "sum"})


@rule("NK201", "batch-dependent-evaluation", severity="error")
def batch_dependent_evaluation(evidence: Evidence) -> Iterator[Finding]:
    """In evaluation the output for an example still depends on the others in its batch.

    Why it hurts: the same example has another output in every batch, a batch of one may fail, and whatever is in a test
    batch, labels in their order or an attack, reaches its neighbors.

    Evidence and threshold: after the model's own eval(), all but the first example of a batch become copies of it; the
    layer is named that is given the same for this example before and after, and returns something else, by more than
    rounding explains. Norms that use the statistics of their batch after eval() are named also without that test.
    The causes: no running statistics (`track_running_stats=False`), a layer that eval() does not reach (in a plain
    list, or by a train() of its own), `F.batch_norm(training=True)`.

    Not a fault when: mixing examples is what the layer is for, as in attention over the batch; only norms, and layers
    that normalize by hand, are reported.

    Remedy: running statistics, `F.batch_norm(..., training=self.training)`, layers in `nn.ModuleList`.
    """
    model, forward, batch = evidence.model, evidence.runs.forward, evidence.runs.several
    if batch is None:
        return
    measured = {one.layer: one.moved for one in couplings(model, batch, forward)}
    static = {norm.name: norm for norm in _with_batch_statistics(model, evidence.norms) if norm.name in evidence.given}
    by_hand = _normalizing(model, batch, forward) if set(measured) - set(static) else set()
    known = {norm.name for norm in evidence.norms if "N" in norm.spec.over} | {*evidence.unknown}
    for name in dict.fromkeys([*static, *(name for name in measured if name in known | by_hand)]):
        moved = measured.get(name)
        how = "" if moved is None else f"; the output for one example moves by {moved:.2g} of its largest with them"
        yield found(
            batch_dependent_evaluation,
            name,
            f"normalizes with the statistics of its batch after model.eval(){how}{_why(static.get(name))}.",
            _remedy(static.get(name)),
            moved=moved,
        )


def _with_batch_statistics(model: nn.Module, norms: list[Norm]) -> list[Norm]:
    """The norms across examples that use the statistics of their batch after the model's own eval()."""
    with untouched(model), in_own_evaluation(model):
        specs = [(norm, describe(norm.layer)) for norm in norms]
    return [norm for norm, spec in specs if spec is not None and "N" in spec.over and spec.uses == "batch"]


def _normalizing(model: nn.Module, batch: object, forward: Forward | None) -> set[str]:
    """The layers that, in evaluation, call an operator which takes statistics over examples."""
    flow = record(model, {}, batch, forward, in_mode=in_evaluation)
    return {event.where for event in flow.events if _is_over_examples(event)}


def _is_over_examples(event: Event) -> bool:
    if is_functional_norm(event):
        return uses_batch_statistics(event)
    if event.operator not in _REDUCTIONS or not event.inputs or event.inputs[0].dim() < 2:
        return False
    over = event.args[1] if len(event.args) > 1 else event.kwargs.get("dim")
    return over is None or 0 in (over if isinstance(over, list | tuple) else [over])


def _why(norm: Norm | None) -> str:
    if norm is None:
        return ": the statistics are taken in a forward, whatever the mode"
    if norm.layer._buffers.get("running_var") is None:
        return ": it stores none"
    return ": eval() does not reach it"


def _remedy(norm: Norm | None) -> str:
    if norm is None:
        return "Pass training=self.training, with running statistics, or use nn.BatchNorm2d as a layer."
    if norm.layer._buffers.get("running_var") is None:
        return "Build it with track_running_stats=True and train, or use nk.convert(model, to='group')."
    return "Keep layers in nn.ModuleList or as attributes, and let train(mode) pass the mode on."
