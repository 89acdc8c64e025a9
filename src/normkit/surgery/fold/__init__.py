"""Folding norms into the layers before or after them: one affine map less to compute, and the same function."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError
from normkit.surgery.fold.affine_map import PER_CHANNEL
from normkit.surgery.fold.apply import Folding
from normkit.surgery.fold.plan import Fold
from normkit.surgery.norms import Norm, norms
from normkit.surgery.operation import Operation, operation
from normkit.surgery.result import Surgery


def fold(model: nn.Module, example: Any, *, forward: Forward | None = None, inplace: bool = False) -> Surgery:
    """Fold the norms of a model into the convolutions and linear layers before or after them.

    Folded is what in evaluation is one scale and shift for each channel, wherever one run of the model on `example`
    shows that nobody else sees the values in between. All others are in `skipped`, with the reason.
    """
    with operation(model, inplace) as op:
        found = norms(op.model)
        for norm in found:
            _check_mode(norm)
        before = op.trace(example, forward)
        folding = Folding(op.model, found, example, forward)
        kept = folding.run()
        _report(op, found, kept, folding.reasons)
        meant = {name for fold in kept for name in fold.meant}
        return op.result(before, example, forward, meant)


def _check_mode(norm: Norm) -> None:
    """Refuse a norm that would use, in evaluation or as it is now, the statistics of a batch."""
    name, layer, spec = norm
    if spec.kind not in PER_CHANNEL or spec.uses == "stored":
        return
    stores = getattr(layer, "running_var", None) is not None
    if stores and layer.training:
        raise ArgumentError(
            f"fold works on what a model computes in evaluation; {name or 'the model'} is in training mode. "
            "Call model.eval() first."
        )
    if not stores and spec.kind != "instance":
        raise ArgumentError(
            f"{name or 'the model'} ({type(layer).__name__}) has no stored statistics to fold: it normalizes every "
            "batch with its own. Set track_running_stats and recalibrate it, or convert it first."
        )


def _report(op: Operation, found: list[Norm], kept: list[Fold], reasons: dict[str, str]) -> None:
    folded = {fold.norm.name: fold for fold in kept}
    for name, _, _ in found:
        if name not in folded:
            op.skip(name, "left as it is", reasons[name])
        elif folded[name].after:
            op.change(
                name, f"folded into {folded[name].where}", "all that it gets comes from there and goes to it alone"
            )
        else:
            op.change(name, f"folded into {folded[name].where}", "all that it gives goes there and nowhere else")
