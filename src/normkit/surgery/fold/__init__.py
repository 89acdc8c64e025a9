"""Folding norms into the layers before or after them: the same function with one affine map less to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError
from normkit.named_layers import display_name
from normkit.snapshot import untouched
from normkit.surgery.fold.apply import apply
from normkit.surgery.fold.dataflow import record
from normkit.surgery.fold.hosts import hosts
from normkit.surgery.fold.plan import Fold, FoldPlan
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Operation, operation
from normkit.surgery.parity import run_example
from normkit.surgery.result import Surgery
from normkit.surgery.selection import Patterns


def fold(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
) -> Surgery:
    """Fold the norms of a model into the convolutions and linear layers before or after them.

    A norm is folded if in evaluation it is one scale and shift for each channel, and if a run of the model on `example`
    shows that nothing else reads the values in between. A layer or RMS norm, which is not, gives its gamma and beta to
    the layers that read its output, and keeps normalizing. All others are in `skipped`, with the reason; those that
    `only` names, in a warning too. `only` and `skip` are names or shell patterns of layers, with what is inside them.
    """
    with operation(model, inplace, only, skip) as op:
        found = op.survey().norms
        for norm in found:
            _check_mode(norm)
        before = op.trace(example, forward)
        plan = _plan(op.model, found, example, forward)
        kept = apply(op.model, plan, lambda: run_example(op.model, example, forward))
        _report(op, found, kept, plan.reasons)
        meant = {name for fold in kept for name in fold.meant}
        return op.result(before, example, forward, meant)


def _plan(model: nn.Module, found: list[Norm], example: Any, forward: Forward | None) -> FoldPlan:
    """Record what the model does on the example, and find hosts for its norms."""
    whole = {norm.name: norm.layer for norm in found if norm.spec.can_fold or norm.spec.moves_affine}
    flow = record(model, whole, example, forward)
    plan = FoldPlan(flow, hosts(model, flow))
    with untouched(model), torch.no_grad():
        plan.find(found)
    return plan


def _check_mode(norm: Norm) -> None:
    """Refuse a norm that would normalize with the statistics of a batch, in evaluation or in its present mode."""
    name, layer, spec = norm
    if not spec.can_fold or spec.uses == "stored":
        return
    stores = getattr(layer, "running_var", None) is not None
    if stores and layer.training:
        raise ArgumentError(
            f"fold works on what a model computes in evaluation; {display_name(name)} is in training mode. "
            "Call model.eval() first."
        )
    if not stores and spec.kind != "instance":
        raise ArgumentError(
            f"{norm.title} has no stored statistics to fold: it normalizes every batch with its own. Set "
            "track_running_stats and recalibrate it, or convert it first."
        )


_WHY = {
    "before": "all that it gets comes from there and goes to it alone",
    "after": "all that it returns goes there and nowhere else",
}


def _report(op: Operation, found: list[Norm], kept: list[Fold], reasons: dict[str, str]) -> None:
    folded = {fold.norm.name: fold for fold in kept}
    for name, _, _ in found:
        if name in folded:
            fold = folded[name]
            op.change(name, f"{_given(fold)} {fold.where}", _WHY[fold.hosts_are])
        else:
            op.skip(name, "left as it is", reasons[name])


def _given(fold: Fold) -> str:
    """What is put into other layers."""
    if not fold.keeps_norm:
        return "folded into"
    parts = {True: "gamma and beta", "scale": "gamma", "shift": "beta"}
    return f"{parts[fold.norm.spec.affine]} moved into"
