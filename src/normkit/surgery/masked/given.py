"""What the caller says of the padding, and which inputs of the model it is said of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normkit.errors import ArgumentError, DtypeError, ShapeError
from normkit.surgery.masked.extent import Extent


class Given:
    """A mask, or the lengths of examples: just one of them."""

    def __init__(self, mask: Tensor | None, lengths: Tensor | Sequence[int] | None, dim: int | None) -> None:
        if (mask is None) == (lengths is None):
            came = "neither" if mask is None else "both"
            raise ArgumentError(f"masked needs a mask, true where positions are real, or lengths=; got {came}.")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool) or dim >= 0):
            raise ArgumentError(f"masked needs dim= counted from the end: -1, -2 and so on; got {dim!r}.")
        self.dim = -1 if dim is None else dim
        self._may_be_another = dim is None
        self._mask = None if mask is None else Extent.of(_checked_mask(mask))
        self._lengths = None if lengths is None else _checked_lengths(lengths)

    def fitted(self, inputs: Sequence[Tensor]) -> tuple[Extent, list[Tensor]]:
        """The real positions of the inputs of a model, and those inputs that have these positions."""
        inputs = [tensor for tensor in inputs if tensor.dim() > 1]
        if not inputs:
            raise ShapeError("masked needs a model whose input has a batch and positions; got no tensor that has both.")
        extent = self._from_lengths(inputs[0]) if self._mask is None else self._mask
        needed = {extent.batch_size, *extent.sizes}
        fitting = [tensor for tensor in inputs if needed <= set(tensor.shape)]
        if not fitting:
            came = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise ShapeError(
                f"masked was given a mask for {extent.batch_size} examples of length {extent}, and the model an input "
                f"of shape {came}. The mask must be that of the input, of this batch."
            )
        return extent, fitting

    def _from_lengths(self, x: Tensor) -> Extent:
        """Lengths are those of the first input: of a dimension of (N, L), (N, C, L), (N, C, F, L) and so on."""
        assert self._lengths is not None
        length, longest = x.shape[max(1, x.dim() + self.dim)], max(self._lengths)
        if x.shape[0] != len(self._lengths):
            raise ShapeError(
                f"masked was given lengths for {len(self._lengths)} examples, and the model an input of shape "
                f"{tuple(x.shape)}, a batch of {x.shape[0]}. Enter the block with the lengths of each batch."
            )
        if longest > length or (self._may_be_another and longest != length and longest in x.shape[1:-1]):
            raise ShapeError(
                f"masked was given lengths up to {longest}, and the model an input of shape {tuple(x.shape)}, whose "
                f"dimension {self.dim} has {length}. If another one is meant, pass dim=: -2 for (N, L, C)."
            )
        return Extent((length,), (self._lengths,))


def _checked_mask(mask: object) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"masked needs a mask that is a tensor; got a {type(mask).__name__}.")
    if mask.is_floating_point() or mask.is_complex():
        raise DtypeError(
            f"masked needs a boolean mask, true where positions are real; got {mask.dtype}. Make it one: mask > 0.5."
        )
    if mask.dim() < 2 or not mask.shape[0]:
        raise ShapeError(
            f"masked needs a mask of shape (N, L), or (N, ...) for maps; got {tuple(mask.shape)}. "
            "Numbers of positions go into lengths=."
        )
    return mask.bool()


def _checked_lengths(lengths: object) -> tuple[int, ...]:
    if isinstance(lengths, Sequence) and not isinstance(lengths, str) and all(type(n) is int for n in lengths):
        lengths = torch.tensor(lengths, dtype=torch.long)
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.dtype is torch.bool:
        came = lengths.dtype if isinstance(lengths, Tensor) else f"a {type(lengths).__name__}"
        raise DtypeError(f"masked needs lengths= of whole numbers, one for each example; got {came}.")
    if lengths.dim() != 1 or not lengths.numel():
        raise ShapeError(f"masked needs lengths= of shape (N,), one for each example; got {tuple(lengths.shape)}.")
    if (lengths < 0).any():
        raise ArgumentError(f"masked needs lengths= that are not negative; got {int(lengths.min())}.")
    return tuple(map(int, lengths.tolist()))
