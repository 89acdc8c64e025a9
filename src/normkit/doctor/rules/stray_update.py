"""NK204."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.ledger import Entry, Ledger
from normkit.doctor.ledger.account import Account
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

_WHY = {
    "no grad": "under no_grad, which does not stop updates",
    "no backward": "and no backward followed: an evaluation in training mode",
    "discarded": "and its gradient was thrown away: an attack, or a probe of the input",
}


@rule("NK204", "stray-update", severity="error", seen_by=("watch",))
def stray_update(ledger: Ledger) -> Iterator[Finding]:
    """A forward that does not train, by a teacher, an attack or an evaluation, wrote the running statistics.

    Why it hurts: in training mode every forward moves the statistics, and `torch.no_grad()` does not stop that. They
    become those of the teacher's, the attack's or the validation's batches, in part, and evaluation goes by them.

    Evidence and threshold: writes by forwards under no_grad; by forwards with a graph that no backward ever reached;
    and by forwards whose gradient was thrown away before a step. One under no_grad is enough. Of the others, those from
    the line that also trains count if there are two without a backward, or if more than half of the steps have one
    whose gradient was thrown away. "writes" says how many, "trained" how many writes there were by forwards that train;
    "file" and "line" name the call, "root" the class of the module that was called.

    Not a fault when: gradients went into the step of another optimizer, as a discriminator's do while its generator
    learns; activation checkpointing ran the forward; a forward raised; statistics were being estimated anew by torch's
    `update_bn`; or a GradScaler skipped a step.

    Remedy: `with nk.no_updates(model):` around that forward, if it needs the batch's own statistics; `model.eval()`
    before it and `model.train()` after it, if it should use the stored ones. Then `nk.recalibrate`.
    """
    for account in ledger.accounts.values():
        strays = _strays(account, ledger.steps)
        if strays:
            worst = max(strays, key=lambda entry: entry.count)
            yield _finding(account, worst, sum(entry.count for entry in strays))


def _strays(account: Account, steps: int) -> list[Entry]:
    lines = {entry.site for entry in account.entries.values() if entry.use == "step"}
    return [entry for entry in account.entries.values() if _is_stray(entry, entry.site in lines, steps)]


def _is_stray(entry: Entry, is_training_line: bool, steps: int) -> bool:
    if entry.use == "no backward":
        return not is_training_line or entry.count > 1
    if entry.use == "discarded":
        return not is_training_line or (entry.steps > 1 and 2 * entry.steps > steps)
    return entry.use == "no grad"


def _finding(account: Account, entry: Entry, count: int) -> Finding:
    site = entry.site
    trained = sum(other.count for other in account.entries.values() if other.use == "step")
    mode = "training" if entry.is_training else "evaluation"
    return found(
        stray_update,
        account.name,
        f"{count} of {account.writes} updates of its statistics came from forwards that do not train. At {site} a "
        f"{'' if site is None else site.root} ran in {mode} mode, {_WHY[entry.use]}.",
        "Wrap that forward in `with nk.no_updates(model):`, or call model.eval() before it; then nk.recalibrate.",
        writes=count,
        trained=trained,
        use=entry.use,
        first_step=entry.first_step,
        root=None if site is None else site.root,
        file=None if site is None else site.file,
        line=None if site is None else site.line,
    )
