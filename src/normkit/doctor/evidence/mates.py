"""Which layers let an example's output depend on the others in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import Forward, feed, tensors_in
from normkit.doctor.evidence.runs import in_own_evaluation
from normkit.hooks import AfterForward, BeforeForward, hooked
from normkit.named_layers import named_layers
from normkit.snapshot import untouched
from normkit.surgery.check_export.batch_mates import batch_size, differs, first_repeated
from normkit.surgery.no_updates import uncompiled
from normkit.surgery.parity import difference


class Coupling(NamedTuple):
    """A layer that mixes examples, and how far the output of one moves with the others, over its largest value."""

    layer: str
    moved: float


class _Seen(NamedTuple):
    """One call of a layer: what the first example brought in, and what it got out."""

    name: str
    before: list[Tensor]
    after: list[Tensor]


def couplings(model: nn.Module, batch: Any, forward: Forward | None) -> list[Coupling]:
    """The innermost layers that give the first example another output for the same input, as its mates change.

    In evaluation, as the model's own eval() sets it. Nothing for a batch that is not one of several examples.
    """
    alone, size = first_repeated(batch), batch_size(batch)
    if alone is None or size is None:
        return []
    one, other = (_calls(model, each, forward, size) for each in (batch, alone))
    if [call.name for call in one] != [call.name for call in other]:
        return []
    found: dict[str, Coupling] = {}
    for a, b in zip(one, other, strict=True):
        is_inner = any(name == a.name or name.startswith(f"{a.name}." if a.name else "") for name in found)
        if not is_inner and not _moved(a.before, b.before) and (moved := _moved(a.after, b.after)):
            found[a.name] = Coupling(a.name, moved)
    return list(found.values())


def _calls(model: nn.Module, batch: Any, forward: Forward | None, size: int) -> list[_Seen]:
    """All calls of layers in the order in which they end."""
    done: list[_Seen] = []
    entered: list[list[Tensor]] = []

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_first(tensors_in((args, kwargs)), size))

    def leave(name: str) -> AfterForward:
        return lambda layer, args, kwargs, output: done.append(
            _Seen(name, entered.pop(), _first(tensors_in(output), size))
        )

    layers = list(named_layers(model))
    before: Sequence[tuple[nn.Module, BeforeForward]] = [(layer, enter) for _, layer in layers]
    hooks = hooked(before=before, after=[(layer, leave(name)) for name, layer in layers])
    with untouched(model), in_own_evaluation(model), uncompiled(), hooks:
        feed(model, batch, forward)
    return done


def _first(tensors: list[Tensor], size: int) -> list[Tensor]:
    """Copies of what belongs to the first example, in tensors that have the examples, or their parts, in a row."""
    rows = [tensor for tensor in tensors if tensor.dim() and tensor.is_floating_point() and len(tensor) % size == 0]
    return [tensor.detach()[: len(tensor) // size].clone() for tensor in rows]


@torch.no_grad()
def _moved(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest relative difference; 0 if it is no more than rounding explains."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.shape == b.shape and a.numel()]
    return max((difference(a, b)[1] for a, b in pairs if differs(a, b)), default=0.0)
