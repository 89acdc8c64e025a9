"""One operation on a model: it succeeds as a whole, or raises and leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError, NormkitError
from normkit.snapshot import Snapshot, same_random_state
from normkit.surgery import parity
from normkit.surgery.result import Change, Parity, Surgery


class Skip(NormkitError):
    """Raised where a layer cannot be changed: it is left as it is, for the reason that is the message.

    `Operation.attempt` turns it into a record of what was skipped; it never leaves a verb.
    """


class CopyError(NormkitError, RuntimeError):
    """A model that cannot be copied."""


class Operation:
    """The model that is operated on, and a record of what is done to it."""

    def __init__(self, model: nn.Module, inplace: bool) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module; got a {type(model).__name__}.")
        self._original = model
        self.model = model if inplace else _copied(model)
        self._snapshot = Snapshot(model) if inplace else None
        self.changed: list[Change] = []
        self.skipped: list[Change] = []

    def change(self, layer: str, what: str, why: str) -> None:
        """Record a layer that was changed."""
        self.changed.append(Change(layer, what, why))

    def skip(self, layer: str, what: str, why: str) -> None:
        """Record a layer that was left as it was."""
        self.skipped.append(Change(layer, what, why))

    @contextmanager
    def attempt(self, layer: str, what: str) -> Iterator[None]:
        """Do something to a layer; a `Skip` ends the block and is recorded with its reason."""
        try:
            yield
        except Skip as reason:
            self.skip(layer, what, str(reason))

    def trace(self, example: Any, forward: Forward | None = None) -> parity.Trace | None:
        """What the model computes on the example at this moment; None without an example."""
        return None if example is None else parity.trace(self.model, example, forward)

    def result(
        self,
        before: parity.Trace | None = None,
        example: Any = None,
        forward: Forward | None = None,
        meant: Collection[str] = (),
    ) -> Surgery:
        """End the operation: its records, and the parity with what the model computed `before`, if that is known."""
        proof: Parity | None = None
        if before is not None:
            after = parity.trace(self.model, example, forward)
            proof = parity.compare(before, after, meant, parity.tolerance(self.model, before.outputs))
        return Surgery(self.model, self.changed, self.skipped, proof, self.undo)

    def undo(self) -> nn.Module:
        """The model as it was before the operation."""
        if self._snapshot is not None:
            self._snapshot.restore()
        return self._original


@contextmanager
def operation(model: nn.Module, inplace: bool) -> Iterator[Operation]:
    """Operate on the model, or on a copy; an error undoes everything."""
    with same_random_state():
        begun = Operation(model, inplace)
        try:
            yield begun
        except BaseException:
            begun.undo()
            raise


def become(layer: nn.Module, other: nn.Module) -> None:
    """Turn a layer into another, keeping its identity: all references to it now refer to the other.

    The layer keeps its hooks, the handles that remove them, and its mode. `other` must not be used afterwards.
    """
    kept = {name: value for name, value in vars(layer).items() if "hook" in name} | {"training": layer.training}
    try:
        layer.__class__ = type(other)
    except TypeError as error:
        raise NormkitError(f"a {type(layer).__name__} cannot become a {type(other).__name__}: {error}") from None
    state = vars(other) | kept
    vars(layer).clear()
    vars(layer).update(state)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CopyError(
            f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error} Pass inplace=True to work on "
            "the model itself; undo() puts it back."
        ) from error
