from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding


@rule("NK104", "inverted-momentum", severity="warning")
def inverted_momentum(evidence: Evidence) -> Iterator[Finding]:
    """A momentum of the other convention, 0.9 or 0.99, in which it weights the old value.

    Why it hurts: in torch momentum weights the new value. 0.99 makes the running statistics those of the last batch,
    noise included, where 0.01 was meant to average a hundred batches. Keras, TensorFlow and JAX have it the other way.

    Evidence and threshold: momentum of 0.9 or more, and less than 1.

    Not a fault when: the statistics of the last batch are wanted. Momentum 1 says so, and is not reported.

    Remedy: 1 minus the momentum.
    """
    for norm in evidence.norms:
        momentum = norm.spec.momentum
        if momentum is None or not 0.9 <= momentum < 1:
            continue
        yield found(
            inverted_momentum,
            norm.name,
            f"momentum {momentum:g} gives the last batch {momentum:.0%} of the running statistics: torch's momentum "
            "weights the new value, and this one comes from where it weights the old.",
            f"layer.momentum = {1 - momentum:.6g}, then nk.recalibrate(model, batches, inplace=True).",
            momentum=momentum,
            meant=round(1 - momentum, 12),
        )
