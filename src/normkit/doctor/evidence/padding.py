"""Positions that hold nothing: the constant ends of examples that were filled up to one length."""

from __future__ import annotations

import torch
from torch import Tensor

_EQUAL = 1e-5  # of the largest value: the same input gives the same output, up to the order in which a kernel sums
_BORDER = 2  # positions at the very end that may differ: convolutions see the zeros beyond the border there
_FEWEST = 2  # equal steps in a row that are an end: one may be chance


def padded_share(x: Tensor) -> float:
    """The part of the positions of (N, C, L) or (N, C, H, W) that are padding.

    Padding is an end of an example that does not change along a dimension, of a length that differs between examples,
    while their other ends change: a picture whose borders are dark has them on both sides. 0 if there is none.
    """
    if x.dim() < 3 or x.shape[0] < 2 or not x.numel():
        return 0.0
    return max(_share_along(x, dim) for dim in range(2, x.dim()))


def _share_along(x: Tensor, dim: int) -> float:
    length = x.shape[dim]
    if length < 4 or not _may_end(x, dim):
        return 0.0
    steps = _equal_steps(x, dim)  # (N, L - 1)
    tail, head = _run(steps.flip(1)), _run(steps)
    for end, other in ((tail, head), (head, tail)):
        padded = torch.where(end >= _FEWEST, end + 1, 0)
        if not padded.any() or bool((padded == padded[0]).all()):
            continue
        if torch.where(padded > 0, other, 0).float().mean() < 0.25 * padded.float().mean():
            return min(padded.float().mean().item() / length, 1.0)
    return 0.0


def _may_end(x: Tensor, dim: int) -> bool:
    """Whether a step near one of the ends is without change, in any example; cheap, for all that has no padding."""
    ends = torch.cat([x.narrow(dim, 0, 4), x.narrow(dim, x.shape[dim] - 4, 4)], dim)
    return bool(_equal_steps(ends, dim).any())


def _equal_steps(x: Tensor, dim: int) -> Tensor:
    """For each example, whether all values at a position are those at the next one: (N, L - 1)."""
    flat = x.movedim(dim, 1).flatten(2)
    largest = flat.abs().amax((1, 2)).clamp(min=torch.finfo(flat.dtype).tiny)
    return (flat.diff(dim=1).abs() <= _EQUAL * largest[:, None, None]).all(2)


def _run(equal: Tensor) -> Tensor:
    """For each example, how many steps in a row are equal, from the beginning or from just behind its border."""
    runs = [equal[:, skip:].long().cumprod(1).sum(1) for skip in range(min(_BORDER + 1, equal.shape[1]))]
    return torch.stack(runs).amax(0)
