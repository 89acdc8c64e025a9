"""The state that norms have in common, and how it passes from one to another."""

from __future__ import annotations

from torch import Tensor, nn

AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def carry_statistics_(new: nn.Module, old: nn.Module, cloned: bool = False) -> None:
    """Give `new` the running statistics of `old` in the places it has for them: the tensors themselves, or clones."""
    for name in STATISTICS:
        stored, place = getattr(old, name, None), new._buffers.get(name)
        if isinstance(stored, Tensor) and place is not None and place.shape == stored.shape:
            new._buffers[name] = stored.detach().clone() if cloned else stored
