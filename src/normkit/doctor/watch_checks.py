"""What watch sees of the faults that examine sees, too. Importing this adds the checks to the rules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from normkit.doctor import rules  # noqa: F401  # the rules that are added to
from normkit.doctor.ledger import Ledger
from normkit.doctor.ledger.account import Account
from normkit.doctor.ledger.mixture import mixture
from normkit.doctor.rule import RULES, found, watched
from normkit.finding import Finding
from normkit.surgery.norms import stored_moments

_INVERTED = 0.9  # the momentum, at least: Keras' and TensorFlow's weight of the old value
_LEAST_DRIFT = 0.01  # standard deviations, of the channel that has moved most


@watched("NK103")
def nonfinite_statistics(ledger: Ledger) -> Iterator[Finding]:
    """Which step and which batch made the statistics NaN or infinite."""
    for account in ledger.accounts.values():
        if account.poison is not None:
            yield _poisoned(account)


def _poisoned(account: Account) -> Finding:
    assert account.poison is not None
    step, of, inputs = account.poison
    site = None if of is None else of.site
    if step < 0:
        when = "when the watch began"
    elif of is None:
        when = f"since step {step}; no forward was seen to do it"
    else:
        given = f"{inputs} values of its input are NaN or infinite" if inputs else "its input is finite"
        when = f"since step {step}, by batch {of.number} (the first is 0), called at {site}; {given}"
    return found(
        RULES["NK103"],
        account.name,
        f"its statistics hold NaN or infinity {when}.",
        "Drop or repair that batch, then nk.recalibrate; nonfinite='skip-update' of normkit's layers keeps it out.",
        step=None if step < 0 else step,
        batch=None if of is None else of.number,
        nonfinite_inputs=inputs,
        file=None if site is None else site.file,
        line=None if site is None else site.line,
    )


@watched("NK104")
def inverted_momentum(ledger: Ledger) -> Iterator[Finding]:
    """Layers that were written with a momentum of the other convention."""
    for account in ledger.accounts.values():
        momentum = getattr(account.layer, "momentum", None)
        if account.writes and isinstance(momentum, float) and _INVERTED <= momentum < 1:
            yield found(
                RULES["NK104"],
                account.name,
                f"its momentum is {momentum:g}, the weight of the new batch: each of the {account.writes} updates kept "
                f"{1 - momentum:.2g} of what was there before. Keras and TensorFlow mean the weight of the old value.",
                f"Set momentum to {1 - momentum:.4g}, then nk.recalibrate.",
                momentum=momentum,
                writes=account.writes,
            )


@watched("NK108")
def mixed_domains(ledger: Ledger) -> Iterator[Finding]:
    """Batches that alternate between two distributions, in one set of statistics."""
    for account in ledger.accounts.values():
        kinds = mixture(account.samples)
        if kinds is None or not kinds.is_evident:
            continue
        lines = sorted({*kinds.lines[0], *kinds.lines[1]})
        yield found(
            RULES["NK108"],
            account.name,
            f"its batches are of two kinds, in turns: they differ by {kinds.distance:.2g} standard deviations, where a "
            f"batch's mean is uncertain by {kinds.error:.2g} at most, and the running statistics are those of neither. "
            f"The batches come from {' and '.join(lines)}.",
            'Keep the statistics apart: nk.convert(model, "domain", num_domains=2) and `with nk.domain(model, k):`; or '
            "put both kinds into every batch.",
            distance=kinds.distance,
            error=kinds.error,
            separation=kinds.separation,
            shares=list(kinds.shares),
            switches=kinds.switches,
            lines=[list(side) for side in kinds.lines],
        )


@watched("NK202")
def frozen_but_drifting(ledger: Ledger) -> Iterator[Finding]:
    """Statistics that moved while nothing before the layer's output, in it or right before it, learned."""
    for account in ledger.accounts.values():
        drift = _drift(account)
        if not account.writes or not _was_frozen(account, ledger) or (drift is not None and drift < _LEAST_DRIFT):
            continue
        site = max(account.entries.values(), key=lambda entry: entry.count).site
        yield found(
            RULES["NK202"],
            account.name,
            f"it does not learn, nor do the weights before it, and {account.writes} forwards have moved its statistics"
            f"{'' if drift is None else f', by up to {drift:.2g} standard deviations'}.",
            "nk.freeze(model.backbone, inplace=True), with the part that is frozen: it survives model.train().",
            drift=drift,
            writes=account.writes,
            file=None if site is None else site.file,
            line=None if site is None else site.line,
        )


def _was_frozen(account: Account, ledger: Ledger) -> bool:
    """Whether its parameters never required a gradient, or no optimizer has them; and so the weights before it."""
    optimized, own = ledger.optimized.intersection(map(id, ledger.model.parameters())), account.parameters
    is_in_none = bool(optimized) and not any(id(parameter) in optimized for parameter in own)
    before = [w for w in ledger.weights.into(account.name) if w.requires_grad and (not optimized or id(w) in optimized)]
    return bool(own) and not before and (is_in_none or account.frozen_writes == account.writes)


def _drift(account: Account) -> float | None:
    """How far the statistics have moved: the means in standard deviations, or these themselves, where they moved most.

    None if the layer stores something else.
    """
    start, now = account.start, stored_moments(account.layer)
    if start is None or now is None or start.mean.shape != now.mean.shape:
        return None
    spread = (start.var.clamp(min=0) + getattr(account.layer, "eps", 0.0)).sqrt()
    of_mean = (now.mean - start.mean).abs() / spread
    of_spread = ((now.var.clamp(min=0) + getattr(account.layer, "eps", 0.0)).sqrt() / spread - 1).abs()
    return _largest(of_mean, of_spread)


def _largest(*values: Tensor) -> float:
    return max(float(value.nan_to_num(nan=float("inf")).max()) for value in values)
