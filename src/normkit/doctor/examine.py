"""One call on a model and some batches: what is wrong with its normalization, where, why, and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from normkit.batches import Forward
from normkit.doctor.diagnosis import Diagnosis, Patient, by_cost
from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.gather import gather
from normkit.doctor.evidence.measure import LossFunction
from normkit.doctor.evidence.over_ranks import EXAMINE, merged_findings
from normkit.doctor.evidence.runs import Runs
from normkit.doctor.evidence.source import same_position
from normkit.doctor.evidence.switches import same_switches
from normkit.doctor.evidence.wiring import is_functional_norm
from normkit.doctor.rule import Rule, chosen
from normkit.doctor.rules.training_mode_export import is_graph
from normkit.errors import ArgumentError
from normkit.finding import Finding
from normkit.named_layers import display_name
from normkit.ranks import must_be_one_model, together
from normkit.snapshot import untouched
from normkit.surgery.norms import norms


def examine(
    model: nn.Module,
    batches: Iterable[Any],
    loss: LossFunction | None = None,
    optimizer: Optimizer | None = None,
    forward: Forward | None = None,
    *,
    select: str | Iterable[str] | None = None,
    ignore: str | Iterable[str] | None = None,
) -> Diagnosis:
    """Find out what is wrong with a model's normalization.

    The model runs on up to 16 of the batches, in training, evaluation and recalibrated mode. It is left exactly as it
    was found, also when its forward raises: parameters, buffers, modes, hooks, attributes, gradients, the optimizer,
    torch's switches, the random states of torch, numpy and Python, and the position of the loader.

    Under a process group, call it on every rank, each with its own batches. Statistics are merged over ranks with their
    counts, measures are averaged, and all ranks have the same findings; what is found on some of them says on which.

    Args:
        model: any model with norm layers, in the mode that it is used in; also a traced module or
            `ExportedProgram.module()`, whose graph alone is read.
        batches: like those it is trained on: a list, a DataLoader. A tensor is the input; of a tuple or list the first
            elements are, as many as forward requires, and the rest are targets; a dictionary holds keyword arguments.
        loss: loss(output, target), such as torch.nn.functional.cross_entropy. The gap of training and evaluation is
            measured by it or, without it, by the distance of outputs.
        optimizer: for the rules that read its groups.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        select: codes, beginnings of codes or names of the rules to check; all by default.
        ignore: those not to check.
    """
    rules = [rule for rule in chosen(select, ignore) if rule.examine is not None]
    together(lambda: _check(model, loss, optimizer, forward), EXAMINE)
    must_be_one_model(model, EXAMINE)
    begun = time.perf_counter()
    if is_graph(model) and not norms(model):
        evidence = Evidence(model, [], {}, {}, Runs(model, [], forward))
        findings = [finding for rule in rules if rule.code == "NK501" for finding in _checked(rule, evidence)]
    else:
        with _undisturbed(model, batches):
            evidence = gather(model, batches, loss, optimizer, forward)
            _must_have_norms(evidence)
            findings = [finding for rule in rules for finding in _checked(rule, evidence)]
    findings = merged_findings(findings, EXAMINE)
    plain = evidence.plain() | {"seconds": time.perf_counter() - begun}
    return Diagnosis(by_cost(findings), plain, Patient(model, evidence.runs.batches, loss, forward))


@contextmanager
def _undisturbed(model: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    with same_switches(), same_position(batches), untouched(model):
        yield


def _checked(rule: Rule, evidence: Evidence) -> list[Finding]:
    """What a rule finds: one finding per layer."""
    assert rule.examine is not None
    by_layer: dict[str | None, Finding] = {}
    for finding in rule.examine(evidence):
        by_layer.setdefault(finding.layer, finding)
    return list(by_layer.values())


def _check(
    model: object, loss: Callable[..., Any] | None, optimizer: object, forward: Callable[..., Any] | None
) -> None:
    if not isinstance(model, nn.Module):
        hint = " Pass its module()." if hasattr(model, "graph_module") else ""
        raise ArgumentError(f"examine needs a torch.nn.Module; got a {type(model).__name__}.{hint}")
    for name, given in (("loss", loss), ("forward", forward)):
        if given is not None and not callable(given):
            raise ArgumentError(f"{name} must be a function; got a {type(given).__name__}.")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer; got a {type(optimizer).__name__}.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ArgumentError(f"{name} has not been initialized: the model has seen no batch yet. Run it once.")
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on the meta device, where nothing is computed. Load the weights first.")


def _must_have_norms(evidence: Evidence) -> None:
    """Raise if there is nothing to examine: no norm layer that we know, and no functional norm in the forward."""
    if evidence.norms or (evidence.flow is not None and any(map(is_functional_norm, evidence.flow.events))):
        return
    name = type(evidence.model).__name__
    if not evidence.unknown:
        raise ArgumentError(f"{name} has no norm layers: there is nothing to examine.")
    listed = ", ".join(f"{display_name(layer)} ({type(m).__name__})" for layer, m in evidence.unknown.items())
    raise ArgumentError(
        f"{name} has no norm layer that is known here. Norms by their names, which are not: {listed}. Make them "
        "subclasses of torch's, or convert them first."
    )
