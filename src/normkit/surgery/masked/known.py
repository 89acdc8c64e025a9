"""What is known of the lengths in one call of a model, and of which tensors they are lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from normkit.errors import DtypeError, NormkitError, ShapeError, UnsupportedError
from normkit.surgery.masked.extent import Extent, Lengths, Step
from normkit.tracing import is_recomputing

ToLength = Callable[[Tensor, Any], Tensor | None]  # the mask given, and the length, or the sizes of several dimensions

_REMEDY = "pass to_length=, a function (mask, length) -> mask, or None where nothing is padding"


class Known:
    """The extents that were worked out so far, and for each tensor those that it may have.

    A tensor has the extents of what it was computed from, as far as their sizes are among its own. One that has none of
    its size, but was computed from masked ones, may have any other of the call: a length that one layer leaves and the
    next restores is the same again.

    Args:
        given: the positions that are real in the model's input.
        dim: the dimension that is masked in maps of several, counted from the end, if it is one alone.
        to_length: the caller's way to the mask of a length that is not known.
    """

    def __init__(self, given: Extent, dim: int, to_length: ToLength | None) -> None:
        self.given, self.dim, self._to_length = given, dim, to_length
        self._by_sizes: dict[tuple[int, ...], list[Extent]] = defaultdict(list)
        self._by_lengths: dict[tuple[tuple[int, ...], Lengths], Extent] = {}
        self._told: dict[tuple[int, ...], Extent | None] = {}
        self._of: Any = WeakTensorKeyDictionary()
        self._added(given)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The masked dimensions of maps (N, C, ...); none if they have others."""
        many = len(self.given.sizes)
        if many == x.dim() - 2:
            return tuple(range(2, x.dim()))
        return (x.dim() + self.dim,) if many == 1 and x.dim() + self.dim >= 2 else ()

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from a masked one."""
        return tensor in self._of

    def mark(self, tensors: Iterable[Tensor], *extents: Extent) -> None:
        """Note that these tensors have these extents, and no others."""
        for tensor in tensors:
            self._of[tensor] = extents

    def inherit(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Note of outputs of which nothing is known that they were computed from these inputs."""
        new = [tensor for tensor in outputs if tensor not in self._of]
        sources = [self._of[tensor] for tensor in inputs if tensor in self._of] if new else []
        every = dict.fromkeys(extent for extents in sources for extent in extents)
        for tensor in new if sources else ():
            self.mark([tensor], *(extent for extent in every if set(extent.sizes) <= set(tensor.shape)))

    def own(self, tensor: Tensor, sizes: Sequence[int]) -> list[Extent]:
        """The extents of these sizes that a tensor has from what it was computed from."""
        return [extent for extent in self._of.get(tensor, ()) if extent.sizes == tuple(sizes)]

    def extent(self, x: Tensor, who: str) -> Extent | None:
        """The extent of maps; None if the caller says that nothing of them is padding. `who` reads them."""
        sizes = tuple(x.shape[dim] for dim in self.dims(x)) or tuple(x.shape[2:])
        found = self.own(x, sizes)
        # A backward that repeats the forward does so with tensors of its own.
        if not found and (self.follows(x) or is_recomputing()):
            found = self._by_sizes.get(sizes, [])
        if len(found) == 1:
            return found[0]
        if self._to_length is None:
            raise self._unexplained(x, sizes, len(found), who)
        if sizes not in self._told:
            mask = self._to_length(self.given.mask(x.device), sizes[0] if len(sizes) == 1 else sizes)
            self._told[sizes] = None if mask is None else self._added(Extent.of(self._checked(mask, sizes)))
        return self._told[sizes]

    def after(self, extent: Extent, steps: Sequence[Step | None], operator: str, who: str) -> Extent | None:
        """The extent after an operator; None if the caller has to say what it is, and is there to be asked."""
        known = [step for step in steps if step is not None]
        after = extent.after(known) if len(known) == len(steps) else None
        if after is not None:
            return self._added(after)
        if self._to_length is not None:
            return None
        why = "what it computes at the end of an example depends on the padding after it"
        if len(known) == len(steps):
            why = "positions move, and those that are real are not the first of each example"
        raise UnsupportedError(
            f"{who}: the mask cannot be followed through {operator}: {why}. Do without it, or {_REMEDY}."
        )

    def _added(self, extent: Extent) -> Extent:
        """The extent, or the one of the same positions that is known already."""
        if extent.lengths is not None:
            extent = self._by_lengths.setdefault((extent.sizes, extent.lengths), extent)
        if extent not in self._by_sizes[extent.sizes]:
            self._by_sizes[extent.sizes].append(extent)
        return extent

    def _checked(self, mask: object, sizes: tuple[int, ...]) -> Tensor:
        needed = (self.given.batch_size, *sizes)
        if not isinstance(mask, Tensor) or mask.is_floating_point():
            came = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise DtypeError(f"to_length needs to return a boolean mask of shape {needed}, or None; got {came}.")
        if mask.shape != needed:
            raise ShapeError(f"to_length needs to return a mask of shape {needed}; got {tuple(mask.shape)}.")
        return mask.bool()

    def _unexplained(self, x: Tensor, sizes: tuple[int, ...], ways: int, who: str) -> NormkitError:
        length = sizes[0] if len(sizes) == 1 else sizes
        others = [str(extents[0]) for extents in self._by_sizes.values() if extents[0] is not self.given]
        if ways > 1:
            why = f"that length was reached in {ways} ways, which leave different numbers of real positions"
        elif not self.follows(x):
            why = "it was not computed from an input that the mask is of"
        else:
            why = f"the mask has length {self.given}, from which {', '.join(others) or 'no other length'} followed"
        return ShapeError(
            f"{who} was given {tuple(x.shape)}, a length of {length}, and which of these positions are real is not "
            f"known: {why}. If the mask is for another dimension, pass dim=; otherwise {_REMEDY}."
        )
