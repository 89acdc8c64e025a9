from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding, Severity

_REMEDY = "DataLoader(..., drop_last=True), another batch size, or nk.convert(model, to='group')."


@rule("NK107", "single-value-batch", severity="error")
def single_value_batch(evidence: Evidence) -> Iterator[Finding]:
    """The loader will hand a layer one value per channel: a last batch of one, or maps of 1x1.

    Why it hurts: one value has no variance. torch raises "Expected more than 1 value per channel when training", often
    only at the end of the first epoch; where nothing is raised, the output is the layer's beta whatever its input is.

    Evidence and threshold: a batch among these that gives a layer one value per channel, or a layer with one value per
    example and a loader whose last batch has one example: the length of its dataset leaves 1 over its batch size, and
    it does not drop the last batch.

    Not a fault when: the loader is used for evaluation alone; if the layer is in evaluation now, it is a warning.

    Remedy: `drop_last=True`, another batch size, or norms within an example.
    """
    seen: set[str] = set()
    for refusal in evidence.refusals:
        if not refusal.is_within and refusal.layer not in seen:
            seen.add(refusal.layer)
            message = f"refuses batch {refusal.batch} (the first is 0): {refusal.message}"
            yield found(single_value_batch, refusal.layer, message, _REMEDY, batch=refusal.batch)
    for name, known in evidence.statistics.items():
        problem = _met(known) or _to_come(known, evidence.smallest_batch)
        if problem is not None and name not in seen:
            severity: Severity = "error" if evidence.modes[name] else "warning"
            numbers = {"values": 1, "smallest_batch": evidence.smallest_batch}
            yield found(single_value_batch, name, problem, _REMEDY, severity=severity, **numbers)


def _met(known: LayerStatistics) -> str | None:
    single = next((call for call in known.calls if call.values == 1), None)
    if single is None:
        return None
    return f"batch {single.batch} (the first is 0) gives it {single.shape}: one value per channel has no variance."


def _to_come(known: LayerStatistics, smallest: int | None) -> str | None:
    if smallest != 1 or not any(call.values == call.examples for call in known.calls):
        return None
    return "the loader's last batch has one example, which will give it one value per channel: that has no variance."
