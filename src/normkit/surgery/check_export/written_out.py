"""Norms that a graph writes out as arithmetic, and the type in which it takes their mean of squares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

Kind = Literal["square", "mean", "variance", "root", "pass", "other"]
HalfNorms = dict[str | None, torch.dtype]  # by layer, the type of the coarsest of its squares

_HALF = (torch.float16, torch.bfloat16)


class Step(NamedTuple):
    """One operation of a graph.

    Attributes:
        kind: what it does to its input; "pass" if it hands a mean of squares on: adds eps, casts, changes the shape.
        inputs: the names of the operations that it takes its inputs from.
        dtype: the type of its output; None if the graph does not say.
        layer: the layer that it belongs to, if that is known.
    """

    kind: Kind
    inputs: Sequence[str]
    dtype: torch.dtype | None
    layer: str | None


def half_norms(steps: Mapping[str, Step]) -> HalfNorms:
    """The layers that divide by the root of a mean of squares, or of a variance, which they take in a half type."""
    found: HalfNorms = {}
    for step in steps.values():
        if step.kind == "root":
            types = {squares.dtype for squares in _squares_under(step, steps)}
            for dtype in _HALF:
                if dtype in types:
                    found.setdefault(step.layer, dtype)
    return found


def _squares_under(root: Step, steps: Mapping[str, Step]) -> Iterator[Step]:
    """The operations whose result, in the type they have, must be large enough for a square."""
    for mean in _before(root, steps, ("mean", "variance")):
        if mean.kind == "variance":
            yield mean
        for square in _before(mean, steps, ("square",)) if mean.kind == "mean" else ():
            yield from (square, mean)


def _before(step: Step, steps: Mapping[str, Step], kinds: Sequence[Kind]) -> Iterator[Step]:
    """The nearest operations of these kinds, with nothing between them and the step that changes values in essence."""
    waiting = list(step.inputs)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in steps or name in seen:
            continue
        seen.add(name)
        if steps[name].kind in kinds:
            yield steps[name]
        elif steps[name].kind == "pass":
            waiting.extend(steps[name].inputs)
