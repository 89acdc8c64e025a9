from __future__ import annotations

from collections.abc import Iterator

import torch

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

LARGE = 0.5  # eps over variance


@rule("NK105", "epsilon-dominates", severity="warning")
def epsilon_dominates(evidence: Evidence) -> Iterator[Finding]:
    """Eps is no longer small beside the variance: the layer does not normalize, or some of its channels are dead.

    Why it hurts: the layer divides by sqrt(variance + eps). Where eps is the larger, it divides by a constant, the
    scale of its input shows in its output, and a variance that trains smaller makes its channel vanish.

    Evidence and threshold: eps over the variance of the layer's input, the median over channels (over sets of values,
    in norms within an example): above 1 it is found, below 0.2 never. Single channels of which that is true are
    reported as info: they are dead, or nearly so.

    Not a fault when: the input is meant to be that small and its scale to matter.

    Remedy: a smaller eps, or a larger input: scale the data, or look at the initialization of the layer before it.
    """
    for norm in evidence.norms:
        eps, known = norm.spec.eps, evidence.statistics.get(norm.name)
        if eps is None:
            continue
        if known is not None and known.data is not None:
            ratio = eps / known.data.var.clamp(min=torch.finfo(torch.float32).tiny)
            yield from _judged(norm.name, eps, ratio.median().item(), int((ratio > LARGE).sum()), ratio.numel())
        elif known is None:
            calls = [call.eps_over_variance for call in evidence.given.get(norm.name, []) if call.values > 1]
            ratios = [ratio for ratio in calls if ratio is not None]
            if ratios:
                yield from _judged(norm.name, eps, min(ratios), 0, 0)


def _judged(name: str, eps: float, ratio: float, dead: int, channels: int) -> Iterator[Finding]:
    if ratio > LARGE:
        yield found(
            epsilon_dominates,
            name,
            f"eps {eps:g} is {ratio:.3g} times the variance of its input (median), so that it hardly normalizes.",
            "Use a smaller eps, or scale what the layer is given.",
            eps=eps,
            ratio=ratio,
            channels=dead,
        )
    elif dead:
        yield found(
            epsilon_dominates,
            name,
            f"{dead} of {channels} channels vary by less than eps {eps:g} over these batches: they are (nearly) dead.",
            "Look at what makes them constant: a ReLU that never fires, pruned weights, a constant input.",
            severity="info",
            eps=eps,
            ratio=ratio,
            channels=dead,
        )
