"""NK205."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.ledger import Ledger
from normkit.doctor.ledger.account import Account, Tally
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

_ALIKE = 0.35  # standard deviations between two inputs of a layer, as in NK305
_CAUSES = {
    "recompute": (
        "activation checkpointing runs its forward again in the backward",
        'Convert the model: nk.convert(model, "batch"); normkit\'s layers count a recomputed batch once.',
    ),
    "reused": (
        "the layer is called several times in one forward",
        "Give each place a norm of its own, or keep the statistics apart with nk.DomainBatchNorm2d.",
    ),
    "repeated": (
        "the model runs several times on the same batch in a step",
        "Run all but one of these forwards in `with nk.no_updates(model):`.",
    ),
}


@rule("NK205", "double-update", severity="warning", seen_by=("watch",))
def double_update(ledger: Ledger) -> Iterator[Finding]:
    """The running statistics are written more than once per optimizer step by the same batch.

    Why it hurts: each batch counts twice, so that a momentum of 0.1 acts like 0.19: the statistics remember fewer
    batches and are noisier. Where a layer is reused, they mix the statistics of several places, and fit none.

    Evidence and threshold: of the steps in which the layer learns, at least half have a second write by one batch:
    inside the backward, which repeats a forward for activation checkpointing; by a second call of the layer in one
    forward; or by a second forward on the very same tensors, which had a backward too. "cause" says which, "times" how
    often at most one batch was counted, "steps" in how many steps; "file" and "line" name the call.

    A layer that is reused is info only, if its inputs are alike: less than 0.35 standard deviations apart in some step.

    Not a fault when: the layer does not count a recomputed batch, as normkit's do not; the second forward ran without a
    gradient (that is NK204); or the batches differ (NK206).

    Remedy: for activation checkpointing, `nk.convert(model, "batch")`; for a second forward on the same batch, `with
    nk.no_updates(model):` around it; for a reused layer, a norm for each place.
    """
    for account in ledger.accounts.values():
        cause = max(account.doubled, key=lambda cause: account.doubled[cause].steps, default=None)
        if cause is not None and (ledger.steps or cause != "repeated"):
            tally = account.doubled[cause]
            if 2 * tally.steps >= max(1, account.trained_steps):
                yield _finding(account, cause, tally)


def _finding(account: Account, cause: str, tally: Tally) -> Finding:
    why, remedy = _CAUSES[cause]
    return found(
        double_update,
        account.name,
        f"in {tally.steps} of {max(tally.steps, account.trained_steps)} steps one batch wrote its statistics up to "
        f"{tally.most} times: {why} (at {tally.site}).",
        remedy,
        severity="info" if tally.apart < _ALIKE else None,
        cause=cause,
        times=tally.most,
        steps=tally.steps,
        first_step=tally.first_step,
        file=None if tally.site is None else tally.site.file,
        line=None if tally.site is None else tally.site.line,
    )
