"""NK307."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from normkit.doctor.ledger import Ledger
from normkit.doctor.ledger.weights import Growth
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.named_layers import display_name

_LEAST = 3.0  # times


@rule("NK307", "runaway-scale", severity="warning", seen_by=("watch",))
def runaway_scale(ledger: Ledger) -> Iterator[Finding]:
    """Scale-invariant weights grow without decay: their effective learning rate is vanishing.

    Why it hurts: a norm after a layer makes the loss indifferent to the scale of the layer's weights, and then every
    step makes them longer. Only their direction counts, and that turns with rate / norm^2: weights that are four times
    as long learn sixteen times more slowly, whatever the schedule says.

    Evidence and threshold: weights that a norm was seen to follow, whose norm is at least 3 times what it was when the
    watch began, and that the optimizer does not decay. "growth" is that ratio, "start" and "end" the norms,
    "effective_rate" the factor by which the effective learning rate has fallen, "decay" the optimizer's weight decay;
    None if no optimizer was given.

    Not a fault when: weight decay holds the weights; they start at zero; or no norm follows them.

    Remedy: weight decay on these weights, of 1e-4 or so for SGD; norms and biases need none.
    """
    for growth in ledger.weights.growth():
        decay = _decay(ledger.optimizer, growth.parameter)
        if growth.ratio >= _LEAST and not decay:
            yield _finding(growth, decay)


def _decay(optimizer: Optimizer | None, parameter: nn.Parameter) -> float | None:
    """The weight decay of a parameter; None if that is not known."""
    groups = [] if optimizer is None else optimizer.param_groups
    group = next((group for group in groups if any(p is parameter for p in group["params"])), None)
    return None if group is None else float(group.get("weight_decay", 0.0))


def _finding(growth: Growth, decay: float | None) -> Finding:
    return found(
        runaway_scale,
        growth.layer,
        f"its weights have grown {growth.ratio:.3g} times, from a norm of {growth.start:.3g} to {growth.end:.3g}, and "
        f"{display_name(growth.before)} takes their scale out again: the effective learning rate has fallen "
        f"{growth.ratio**2:.3g} times.",
        "Give these weights weight decay, of 1e-4 or so.",
        growth=growth.ratio,
        start=growth.start,
        end=growth.end,
        effective_rate=growth.ratio**-2,
        decay=decay,
        norm=growth.before,
    )
