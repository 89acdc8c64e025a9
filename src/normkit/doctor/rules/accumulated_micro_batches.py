"""NK206."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.ledger import Ledger
from normkit.doctor.ledger.account import Account
from normkit.doctor.ledger.mixture import mixture
from normkit.doctor.rule import found, rule
from normkit.finding import Finding

_OWN_WAYS = ("accumulated", "domain")  # kinds that take several batches per step as they are meant


@rule("NK206", "accumulated-micro-batches", severity="warning", seen_by=("watch",))
def accumulated_micro_batches(ledger: Ledger) -> Iterator[Finding]:
    """Gradients accumulate over several batches, statistics do not.

    Why it hurts: the step is that of a large batch, but each micro-batch is normalized with its own few examples, and
    the running statistics move once for each. Accumulating four batches of 8 is not training with 32: the noise of the
    statistics is that of 8.

    Evidence and threshold: in at least half of the steps in which the layer learns, two or more different batches had a
    backward each, and the gradient was not reset in between. "batches" says how many at most, "batch_size" how large
    the smallest was.

    Not a fault when: the layer merges the moments of the micro-batches, as `nk.AccumulatedBatchNorm2d` does; the
    batches are one batch in several forwards with one backward; or they are of different kinds, which is NK108.

    Remedy: `nk.convert(model, "accumulated", micro_batches=k)`, or a norm that does not depend on the batch:
    `nk.convert(model, "group")`; or larger batches without accumulation.
    """
    if not ledger.steps:  # what lies between two steps is not known
        return
    for account in ledger.accounts.values():
        tally, spec = account.accumulated, account.spec
        if not tally.steps or 2 * tally.steps < account.trained_steps or (spec is not None and spec.kind in _OWN_WAYS):
            continue
        kinds = mixture(account.samples)
        if kinds is None or not kinds.is_evident:
            yield _finding(account)


def _finding(account: Account) -> Finding:
    tally, sizes = account.accumulated, _batch_sizes(account)
    least = f" of {min(sizes)} examples" if sizes else ""
    return found(
        accumulated_micro_batches,
        account.name,
        f"in {tally.steps} of {account.trained_steps} steps gradients of up to {tally.most} batches were accumulated; "
        f"its statistics are those of one batch{least}, and move {tally.most} times per step.",
        f'nk.convert(model, "accumulated", micro_batches={tally.most}), or nk.convert(model, "group").',
        batches=tally.most,
        batch_size=min(sizes, default=None),
        steps=tally.steps,
        first_step=tally.first_step,
        file=None if tally.site is None else tally.site.file,
        line=None if tally.site is None else tally.site.line,
    )


def _batch_sizes(account: Account) -> list[int]:
    return [entry.batch_sizes[0] for entry in account.entries.values() if entry.use == "step" and entry.batch_sizes]
