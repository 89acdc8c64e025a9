"""Who wrote which statistics, when and how often, over a real training loop."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from normkit.batches import tensors_in
from normkit.doctor.call_site import call_site
from normkit.doctor.diagnosis import by_cost
from normkit.doctor.evidence.over_ranks import merged_findings
from normkit.doctor.ledger.account import Account, Entry, frozen_by
from normkit.doctor.ledger.hook import Guard, Hook
from normkit.doctor.ledger.passes import Pass, Window
from normkit.doctor.ledger.statistics import all_finite, stores_statistics
from normkit.doctor.ledger.weights import Weights
from normkit.doctor.rule import Rule
from normkit.errors import ArgumentError, NormkitWarning
from normkit.finding import Finding
from normkit.hooks import hooked
from normkit.named_layers import named_layers
from normkit.spec import describe
from normkit.surgery.norms import Norm, norms
from normkit.tracing import is_recomputing

WATCH = "watch"


class _Now(local):
    """What runs in a thread: the modules that have been entered, and the pass they belong to."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.of: Pass | None = None


class Ledger:
    """What `watch` gives: every write of running statistics, and what is wrong with them.

    Attributes:
        model: the model that is watched.
        optimizer: the optimizer whose steps are counted; None if the caller counts them with `step`.
        steps: how many steps have ended.
        passes: how many calls into the model were seen.
        accounts: by the layer's name, what is kept of each layer with running statistics.
        weights: the weights that norms follow.
        optimized: the parameters, by id, of every optimizer that was seen to make a step.
        over_ranks: whether all ranks of the process group watch, and have the findings of all once they are closed.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, rules: Sequence[Rule], over_ranks: bool = False
    ) -> None:
        self.model, self.optimizer, self.over_ranks = model, optimizer, over_ranks
        self.steps = self.passes = 0
        self.accounts = _accounts(model)
        self.weights = Weights(model)
        self.optimized: set[int] = set()
        self._rules = rules
        self._findings: list[Finding] | None = None
        self._guard = Guard()
        self._now = _Now()
        self._given: dict[tuple[int, ...], Pass] = {}  # by their inputs, the passes of this step
        self._windows: dict[int, Window] = {}  # by their parameters
        self._met: set[str] = set()  # norms whose weights are known
        self._hold = ExitStack()
        self._attach()

    # ---- for users

    @property
    def writes(self) -> list[Entry]:
        """Every write that is settled, those of one layer, line and use together."""
        return [entry for account in self.accounts.values() for entry in account.entries.values()]

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, errors first; complete when the ledger is closed."""
        return self._find() if self._findings is None else self._findings

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def stopped(self) -> str | None:
        """The error that has stopped the ledger, while the run went on; None if there was none."""
        return self._guard.stopped

    def step(self) -> None:
        """End a step, where no optimizer was given whose steps are seen."""
        if self.optimizer is not None:
            raise ArgumentError("the optimizer's own steps are counted; step() is for watch without optimizer=.")
        self._end_step()

    def close(self) -> None:
        """Let go of the model, which is as it was without the ledger. The findings are complete.

        With `over_ranks` this waits for all ranks.
        """
        if self._findings is None:
            self._let_go()
            if self.over_ranks:
                self._findings = by_cost(merged_findings(self.findings, WATCH))

    @property
    def unseen(self) -> list[str]:
        """Layers whose statistics have moved in step after step, in no forward that could be seen."""
        return [account.name for account in self.accounts.values() if account.is_unseen]

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        elif self._findings is None:  # the other ranks are inside the loop, and wait for something else
            self._let_go()

    def __repr__(self) -> str:
        count = sum(entry.count for entry in self.writes)
        return f"Ledger({count} writes to {len(self.accounts)} layers in {self.steps} steps)"

    def _let_go(self) -> None:
        self._hold.close()
        if self.stopped is None:
            self._settle(is_last=True)
        self._findings = self._find()
        self._say_what_was_unseen()

    def _find(self) -> list[Finding]:
        return by_cost(finding for rule in self._rules if rule.watch is not None for finding in rule.watch(self))

    def _say_what_was_unseen(self) -> None:
        if self.unseen:
            warnings.warn(
                f"watch saw no forward of {len(self.unseen)} layers whose statistics moved, {self.unseen[0]} among "
                "them: compiled code calls no hooks, and what is found there is not complete. Pass what "
                "torch.compile(model) returns; after model.compile(), watch an uncompiled model.",
                NormkitWarning,
                stacklevel=5,
            )

    # ---- passes

    def _attach(self) -> None:
        around = _modules_around(self.accounts, dict(named_layers(self.model)))
        before = [(module, self._hook(self._enter)) for module in around]
        before += [(norm.layer, self._hook(self._meet, norm)) for norm in norms(self.model) if norm.spec.has_gamma]
        after = [(account.layer, self._hook(self._ran, account)) for account in self.accounts.values()]
        after += [(module, self._hook(self._leave)) for module in around]
        self._hold.enter_context(hooked(before=before, after=after, always=True))
        self._hold.callback(register_optimizer_step_post_hook(self._hook(self._stepped)).remove)
        self._hold.callback(self._close_windows)

    def _hook(self, function: Callable[..., None], *known: object) -> Hook:
        return Hook(partial(function, *known), self._guard)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._now.entered:
            self._begin_pass(tensors_in((args, kwargs)))
        self._now.entered.append(id(module))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered, of = self._now.entered, self._now.of
        if id(module) not in entered:  # an earlier hook raised before it was entered
            return
        while entered.pop() != id(module):
            pass
        if not entered and of is not None:
            self._now.of = None
            self._end_pass(of, output)

    def _begin_pass(self, given: list[Tensor]) -> None:
        of = Pass(self.passes, self.steps, torch.is_grad_enabled(), is_recomputing())
        of.take(given)
        key = tuple(map(id, given))
        other = self._given.get(key)
        if other is not None and of.has_batch_of(other):
            of.repeats, other.is_repeated = other, True
        elif not of.is_recompute:
            self._given[key] = of
        self.passes += 1
        self._now.of = of
        for account in self.accounts.values():
            account.statistics.look()

    def _end_pass(self, of: Pass, output: Any) -> None:
        of.has_failed = output is None and sys.exc_info()[0] is not None
        for account in self.accounts.values():
            # Not by a call of the layer, then: a function was called with its buffers, or compiled code.
            if account.name not in of.visited and account.statistics.has_moved():
                self._wrote(account, of, output)

    def _ran(
        self, account: Account, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        of = self._now.of
        if of is None or layer is not account.layer:  # a replica of DataParallel has its own statistics
            return
        of.visited.add(account.name)
        if of.is_recompute:
            account.ran_again(output)
        if account.statistics.has_moved():
            self._wrote(account, of, output)

    def _wrote(self, account: Account, of: Pass, output: Any) -> None:
        of.visited.add(account.name)
        if of.site is None:
            of.site = call_site()
        account.wrote(of, self._window(account)).follow(output)

    def _meet(self, norm: Norm, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See once which weights a norm follows."""
        if norm.name in self._met:
            return
        x, spec = next(iter(tensors_in((args, kwargs))), None), describe(layer)
        if x is not None and x.grad_fn is not None and spec is not None and spec.uses == "batch":
            self._met.add(norm.name)
            self.weights.precede(norm.name, x)

    # ---- steps

    def _window(self, account: Account) -> Window | None:
        """The gradients that tell what a step used: those of the layer's own parameters, or else of the model's."""
        for parameters in (account.layer.parameters(), self.model.parameters()):
            trained = next((parameter for parameter in parameters if parameter.requires_grad), None)
            if trained is not None:
                if id(trained) not in self._windows:
                    self._windows[id(trained)] = Window(trained)
                return self._windows[id(trained)]
        return None

    def _close_windows(self) -> None:
        for window in self._windows.values():
            window.remove()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.optimized.update(id(p) for group in optimizer.param_groups for p in group["params"])
        if optimizer is self.optimizer:
            self._end_step()
            return
        for account in self.accounts.values():
            account.was_used_elsewhere()

    def _end_step(self) -> None:
        self._now.entered.clear()  # what an interrupt has left
        self._settle(is_last=False)
        self._given.clear()
        self.steps += 1
        if self.steps == 1 and not self.passes and self.writes:
            self._attach_to_compiled()

    def _attach_to_compiled(self) -> None:
        """The loop does not call the model, but what torch.compile made of it: to look for that takes a while."""
        around = _compiled_from(self.model)
        before = [(module, self._hook(self._enter)) for module in around]
        after = [(module, self._hook(self._leave)) for module in around]
        self._hold.enter_context(hooked(before=before, after=after, always=True))

    def _settle(self, is_last: bool) -> None:
        for account in self.accounts.values():
            account.settle(self.steps, is_last)
        for window in self._windows.values():
            window.tasks.clear()
        waiting = [account for account in self.accounts.values() if account.awaits_check]
        if waiting and not all_finite(account.layer for account in waiting):
            for account in waiting:
                account.check_finite(self.steps, None)


def _accounts(model: nn.Module) -> dict[str, Account]:
    """An account for every layer that has running statistics, known or not."""
    layers = dict(named_layers(model))
    scripted = next((layer for layer in layers.values() if isinstance(layer, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ArgumentError(
            f"watch cannot look into a scripted {scripted.original_name}; pass the model it was made from."
        )
    return {
        name: Account(name, layer, describe(layer), frozen_by(layer, layers.get(name.rpartition(".")[0])))
        for name, layer in layers.items()
        if stores_statistics(layer)
    }


def _modules_around(names: Iterable[str], layers: dict[str, nn.Module]) -> list[nn.Module]:
    """These layers, and all modules that they are in.

    Not those that write buffers themselves before they call the model, as DistributedDataParallel does.
    """
    names = list(names)
    writers = (DistributedDataParallel, nn.DataParallel)
    return [
        module
        for outer, module in layers.items()
        if not isinstance(module, writers) and any(_is_within(name, outer) for name in names)
    ]


def _compiled_from(model: nn.Module) -> list[nn.Module]:
    """What torch.compile has made of the model: the loop calls that, and the hooks inside are not called."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # before it is loaded, nothing has been compiled
    if dynamo is None:
        return []
    compiled = [found for found in gc.get_objects() if type(found) is dynamo.OptimizedModule]
    return [found for found in compiled if found._orig_mod is model]


def _is_within(name: str, outer: str) -> bool:
    return outer in ("", name) or name.startswith((f"{outer}.", f"{outer}["))
