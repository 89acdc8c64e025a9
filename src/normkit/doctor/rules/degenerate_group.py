from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

_WITHIN = ("group", "instance", "layer", "evo-s0")
_REMEDY = "Use fewer groups (more channels in each), or a norm over more values: nk.convert(model, to='layer')."


@rule("NK304", "degenerate-group", severity="error")
def degenerate_group(evidence: Evidence) -> Iterator[Finding]:
    """A group or an instance has one value, which its norm turns into zero.

    Why it hurts: one value is its own mean. What is left is beta, whatever the input: the layer passes nothing on. It
    happens to GroupNorm with as many groups as channels, and to InstanceNorm, once maps have shrunk to 1x1, and often
    after a BatchNorm was converted.

    Evidence and threshold: one value per statistic, from the shape of what the layer was given.

    Not a fault when: never. A batch of one value per channel is NK107.

    Remedy: fewer groups, or a norm over more values.
    """
    seen: set[str] = set()
    for refusal in evidence.refusals:
        if refusal.is_within and refusal.layer not in seen:
            seen.add(refusal.layer)
            yield found(degenerate_group, refusal.layer, f"refuses its input: {refusal.message}", _REMEDY, values=1)
    for norm in evidence.norms:
        single = next((call for call in evidence.given.get(norm.name, []) if call.values == 1), None)
        if single is None or norm.name in seen or norm.spec.kind not in _WITHIN or norm.spec.uses == "stored":
            continue
        yield found(
            degenerate_group,
            norm.name,
            f"is given {single.shape}, in which every {norm.spec.kind} has one value: its output is beta, whatever "
            "the input.",
            _REMEDY,
            values=1,
            shape=list(single.shape),
        )
