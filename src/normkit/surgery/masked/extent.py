"""Which positions of a padded batch are real, at one length of those that a model brings it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

Step = Callable[[int], int]  # the length after an operator, of the length before it
Lengths = tuple[tuple[int, ...], ...]  # of every example, for each dimension that is masked


class Extent:
    """The real positions of maps of one size: the first ones of each example, or those of any mask.

    Attributes:
        sizes: of the dimensions that are masked: (T,), or (H, W).
        lengths: how many positions of each dimension are real, if these are the first ones; otherwise None.
    """

    def __init__(self, sizes: Sequence[int], lengths: Lengths | None, mask: Tensor | None = None) -> None:
        self.sizes, self.lengths = tuple(sizes), lengths
        self._masks = {} if mask is None else {mask.device: mask}

    @classmethod
    def of(cls, mask: Tensor) -> Extent:
        """The positions where a mask (N, ...) is true."""
        reached = [mask.movedim(dim, 1).unsqueeze(-1).flatten(2).any(2).sum(1) for dim in range(1, mask.dim())]
        first = cls(mask.shape[1:], tuple(tuple(one.tolist()) for one in reached))
        return first if torch.equal(first.mask(mask.device), mask) else cls(mask.shape[1:], None, mask)

    @property
    def batch_size(self) -> int:
        """How many examples it is of."""
        return len(next(iter(self._masks.values())) if self.lengths is None else self.lengths[0])

    def mask(self, device: torch.device) -> Tensor:
        """True where positions are real: (N, *sizes)."""
        if device not in self._masks:
            self._masks[device] = self._made(device)
        return self._masks[device]

    def on(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The mask as it broadcasts against x, of which `dims` are the masked dimensions."""
        shape = [1] * x.dim()
        for dim, size in zip((0, *dims), self.mask(x.device).shape, strict=True):
            shape[dim] = size
        return self.mask(x.device).reshape(shape)

    def after(self, steps: Sequence[Step]) -> Extent | None:
        """The extent after an operator; None if the real positions are not the first, and may be others after it."""
        pairs = list(zip(steps, self.sizes, strict=True))
        if self.lengths is None:
            keeps_all = all(step(n) == n for step, size in pairs for n in (size, max(1, size - 1), 1))
            return self if keeps_all else None
        # An operator may make something of nothing, its own padding; an example without positions stays without.
        after = [[max(0, step(n)) if n else 0 for n in own] for step, own in zip(steps, self.lengths, strict=True)]
        return Extent([step(size) for step, size in pairs], tuple(map(tuple, after)))

    def __str__(self) -> str:
        return str(self.sizes[0] if len(self.sizes) == 1 else self.sizes)

    def _made(self, device: torch.device) -> Tensor:
        if self.lengths is None:
            return next(iter(self._masks.values())).to(device)
        parts = [
            torch.arange(size, device=device) < torch.tensor(own, device=device)[:, None]
            for own, size in zip(self.lengths, self.sizes, strict=True)
        ]
        rank = len(parts)
        return reduce(torch.logical_and, (p.reshape(len(p), *_alone(i, rank, p.shape[1])) for i, p in enumerate(parts)))


def _alone(dim: int, rank: int, size: int) -> list[int]:
    """The shape of one dimension among others."""
    return [size if other == dim else 1 for other in range(rank)]
