from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

COUNTED = 0.05  # the part of the positions


@rule("NK109", "padding-in-statistics", severity="warning")
def padding_in_statistics(evidence: Evidence) -> Iterator[Finding]:
    """Padded positions are counted in the statistics of a norm.

    Why it hurts: mean and variance depend on how much padding a batch happens to have, so that the output for a
    sequence changes with the length of the longest in its batch.

    Evidence and threshold: the ends of the examples that the layer is given are constant, over lengths that differ from
    example to example, while their other ends are not; 5% of all positions or more.

    Not a fault when: the constant ends are data, such as silence that belongs to the recording.

    Remedy: `with nk.masked(model, mask):` around the call, `mask=` of normkit's batch, group and instance norms, or a
    norm over the channels of each position (layer).
    """
    for norm in evidence.norms:
        shares = [call.padded for call in evidence.given.get(norm.name, [])]
        padded = sum(shares) / len(shares) if shares else 0.0
        if padded < COUNTED:
            continue
        yield found(
            padding_in_statistics,
            norm.name,
            f"{padded:.0%} of the positions that its statistics are taken of are padding.",
            "with nk.masked(model, mask): around the call, or nk.convert(model, to='batch') and layer(x, mask=mask)",
            padded=padded,
        )
