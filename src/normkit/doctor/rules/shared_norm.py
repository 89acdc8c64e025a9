from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.moments import Moments

DIFFERENT = 0.35  # standard deviations


@rule("NK305", "shared-norm", severity="warning")
def shared_norm(evidence: Evidence) -> Iterator[Finding]:
    """One norm layer with running statistics sees several different inputs.

    Why it hurts: in training each input is normalized by itself, in evaluation all by one average, which is right for
    none of them. A norm in a recurrent cell, or one used for two branches, does that.

    Evidence and threshold: the layer is called several times in one forward. It is a warning if the means or standard
    deviations of two of these inputs are 0.35 standard deviations apart or more, and info if they are alike.

    Not a fault when: the inputs have one distribution, as two views of the same pictures have. Norms without running
    statistics may be shared.

    Remedy: a layer for each use (for each step, in a recurrent cell), `nk.DomainBatchNorm2d`, or a norm within an
    example.
    """
    for norm, known in evidence.stored:
        uses = _uses(known)
        if len(uses) < 2:
            continue
        apart = max(_apart(one, other) for i, one in enumerate(uses) for other in uses[i + 1 :])
        how = "differ" if apart >= DIFFERENT else "are alike"
        yield found(
            shared_norm,
            norm.name,
            f"is called {len(uses)} times in one forward, and stores one average for all; these inputs {how}: they are "
            f"up to {apart:.2g} standard deviations apart.",
            "Give each use a layer of its own.",
            severity="warning" if apart >= DIFFERENT else "info",
            calls=len(uses),
            apart=apart,
        )


def _uses(known: LayerStatistics) -> list[Moments]:
    """The pooled moments of the first call of each forward, of the second, and so on."""
    by_position: dict[int, list[Moments]] = {}
    for call in known.finite_calls:
        by_position.setdefault(call.position, []).append(call.moments)
    return [reduce(Moments.merge, moments) for moments in by_position.values()]


def _apart(one: Moments, other: Moments) -> float:
    alive = (one.var > 0) & (other.var > 0)
    if not alive.any():
        return 0.0
    var, std = (one.var[alive], other.var[alive]), ((one.var[alive] + other.var[alive]) / 2).sqrt()
    of_mean = ((one.mean - other.mean)[alive] / std).square().mean().sqrt()
    of_std = ((var[0].sqrt() - var[1].sqrt()) / std).square().mean().sqrt()
    return max(of_mean.item(), of_std.item())
