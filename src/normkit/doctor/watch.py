"""Watch a training loop: who writes running statistics, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from normkit.doctor import watch_checks  # noqa: F401  # importing it adds them to the rules
from normkit.doctor.ledger import WATCH, Ledger
from normkit.doctor.rule import chosen
from normkit.errors import ArgumentError
from normkit.frameworks import unwrapped_optimizer
from normkit.ranks import must_be_one_model


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    select: str | Iterable[str] | None = None,
    ignore: str | Iterable[str] | None = None,
    over_ranks: bool = False,
) -> Ledger:
    """Keep a ledger of a training loop: who wrote which statistics, when and how often. The run is not changed.

    Use it as `with nk.watch(model, optimizer=optimizer) as ledger:` around the loop, or keep what it returns and call
    its `close()`. `ledger.findings` has what is wrong, `ledger.writes` every write.

    Args:
        model: any model; wrapped or compiled, pass what the loop calls, or what is inside.
        optimizer: a step ends with its `step()`; without it, call `ledger.step()` at the end of each.
        select: codes, beginnings of codes or names of the rules to go by; without it, all.
        ignore: those to leave out.
        over_ranks: every rank of the process group watches its copy of the model. When all have closed their ledgers,
            each has the findings of all, and what only some of them found says on which ranks. Without it nothing is
            exchanged, and one rank may watch alone.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"watch needs a torch.nn.Module; got a {type(model).__name__}.")
    found = None if optimizer is None else unwrapped_optimizer(optimizer)
    if optimizer is not None and found is None:
        raise ArgumentError(
            f"watch needs a torch.optim.Optimizer, whose steps it counts; got a {type(optimizer).__name__}. Without "
            "one, call ledger.step() at the end of each step."
        )
    if over_ranks:
        must_be_one_model(model, WATCH)
    return Ledger(model, found, chosen(select, ignore), over_ranks)
