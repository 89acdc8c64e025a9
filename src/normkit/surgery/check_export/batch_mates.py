"""Whether a model's output for one example depends on the others in its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.batches import Forward, map_leaves, tensors_in
from normkit.snapshot import untouched
from normkit.surgery.parity import ROUNDING, difference, run_example

_KERNELS = 16  # times the rounding of one layer: with another batch every layer may use another kernel


def depends_on_mates(model: nn.Module, example: Any, forward: Forward | None = None) -> bool:
    """Whether the first example's output changes when all others become copies of it.

    The model runs in its present mode, and is left as it was. Also False if the example is not a batch of several.
    """
    alone = first_repeated(example)
    if alone is None:
        return False
    outputs = []
    for batch in (example, alone):
        with untouched(model), torch.no_grad():
            outputs.append([tensor.clone() for tensor in tensors_in(run_example(model, batch, forward))])
    return _first_moves(*outputs)


def first_repeated(example: Any) -> Any:
    """A batch of copies of its first example; None if it is not a batch of several."""
    size = batch_size(example)
    if size is None or size < 2:
        return None
    return map_leaves(example, lambda leaf: leaf[:1].expand_as(leaf).clone() if _is_batch(leaf, size) else leaf)


def batch_size(example: Any) -> int | None:
    """How many examples a batch has: the length of its first tensor; None if it has no such tensor."""
    return next((len(leaf) for leaf in tensors_in(example) if leaf.dim()), None)


def _is_batch(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def _first_moves(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether the first row of an output differs by more than rounding explains."""
    rows = [(a[0], b[0]) for a, b in zip(before, after, strict=True) if a.dim() and a.is_floating_point()]
    return any(differs(a, b) for a, b in rows)


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two floating-point tensors of one shape differ by more than rounding explains."""
    return difference(a, b)[1] > _KERNELS * ROUNDING * torch.finfo(a.dtype).eps
