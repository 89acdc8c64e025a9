"""Whether what a model gives for one example depends on the others in its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.batches import Forward, tensors_in
from normkit.snapshot import untouched
from normkit.surgery.parity import ROUNDING, difference, run_example

_KERNELS = 16  # another batch may take other kernels in every layer, which round in another order


def depends_on_mates(model: nn.Module, example: Any, forward: Forward | None = None) -> bool:
    """Whether the first example's output changes when all others become copies of it.

    The model is run in the mode it is in, and left as it was. False, too, if the example is no batch of several.
    """
    alone = _first_repeated(example)
    if alone is None:
        return False
    outputs = []
    for batch in (example, alone):
        with untouched(model), torch.no_grad():
            outputs.append([tensor.clone() for tensor in tensors_in(run_example(model, batch, forward))])
    return _first_moves(*outputs)


def _first_repeated(example: Any) -> Any:
    """A batch of copies of its first example; None if it is not one of several."""
    if isinstance(example, Tensor):
        return example[:1].expand_as(example).clone() if example.dim() and len(example) > 1 else None
    if isinstance(example, Mapping):
        items = {key: _first_repeated(value) for key, value in example.items()}
        return None if any(value is None for value in items.values()) else items
    if isinstance(example, list | tuple):
        copies = [_first_repeated(item) for item in example]
        return None if any(copy is None for copy in copies) else copies
    return None


def _first_moves(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether the first row of any output is another than rounding explains."""
    rows = [(a[0], b[0]) for a, b in zip(before, after, strict=True) if a.dim() and a.is_floating_point()]
    return any(difference(a, b)[1] > _KERNELS * ROUNDING * torch.finfo(a.dtype).eps for a, b in rows)
