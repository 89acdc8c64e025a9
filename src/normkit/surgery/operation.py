"""One operation on a model: it succeeds as a whole, or raises and leaves everything as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError, NormkitError, NormkitWarning
from normkit.named_layers import display_name
from normkit.snapshot import Snapshot, same_random_state
from normkit.surgery import norms, parity
from normkit.surgery.result import Change, Parity, Surgery
from normkit.surgery.selection import Patterns, Selection

SHOWN = 6  # layers that a warning names for each reason; `Surgery.skipped` has them all


class Skip(NormkitError):
    """Raised where a layer cannot be changed: it is left as it is, for the reason that is the message.

    `Operation.attempt` turns it into a record of what was skipped; it never leaves a verb.
    """


class NothingToDo(Skip):
    """Raised where a layer is as it was asked to be: that it is left is worth no warning."""


class CopyError(NormkitError, RuntimeError):
    """A model that cannot be copied."""


class Operation:
    """The model that is operated on, the layers that were asked for, and a record of what is done to them."""

    def __init__(
        self, model: nn.Module, inplace: bool, only: Patterns | None = None, skip: Patterns | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module; got a {type(model).__name__}.")
        self._selection = Selection(model, only, skip)
        self._original = model
        self.model = model if inplace else _copied(model)
        self._snapshot = Snapshot(model) if inplace else None
        self.changed: list[Change] = []
        self.skipped: list[Change] = []
        self._asked: set[str] = set()
        self._as_asked: set[str] = set()

    def survey(self) -> norms.Survey:
        """The norms that `only=` and `skip=` leave to the verb; the others are recorded as skipped."""
        found = norms.survey(self.model).without_parts()
        layers = {norm.name: norm.layer for norm in found.norms} | found.unknown
        taken = self._selection.among(layers)
        for name, layer in layers.items():
            if name not in taken:
                self.skip(name, type(layer).__name__, self._selection.reason(name))
        if self._selection.has_only:
            self._asked = taken
        unknown = {name: layer for name, layer in found.unknown.items() if name in taken}
        return norms.Survey([norm for norm in found.norms if norm.name in taken], unknown)

    def ask(self, found: norms.Survey, meant: Collection[str]) -> set[str]:
        """Settle which layers were asked for, so that leaving one of them is worth a warning.

        Those are the layers of the kind that the verb is about, `meant`, and all that `only=` fits by their own names.
        Where `only=` leaves none of these, it means what it takes: nothing else can be meant.
        """
        taken = {norm.name for norm in found.norms} | set(found.unknown)
        named = {name for name in taken if self._selection.has_only and self._selection.names(name)}
        self._asked = (taken & set(meant)) | named or (taken if self._selection.has_only else set())
        return self._asked

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
            if isinstance(reason, NothingToDo):
                self._as_asked.add(layer)

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
        """End the operation: its records, and the parity with what the model computed `before`, if that is known.

        Warns of layers that were asked for and left. To be called by the verb itself: the warning names its caller.
        """
        proof: Parity | None = None
        if before is not None:
            after = parity.trace(self.model, example, forward)
            proof = parity.compare(before, after, meant, parity.tolerance(self.model, before.outputs))
        left = [one for one in self.skipped if one.layer in self._asked - self._as_asked]
        if left:
            warnings.warn(_in_words(left), NormkitWarning, stacklevel=3)
        return Surgery(self.model, self.changed, self.skipped, proof, self.undo)

    def undo(self) -> nn.Module:
        """The model as it was before the operation."""
        if self._snapshot is not None:
            self._snapshot.restore()
        return self._original


@contextmanager
def operation(
    model: nn.Module, inplace: bool, only: Patterns | None = None, skip: Patterns | None = None
) -> Iterator[Operation]:
    """Operate on the model, or on a copy; an error undoes everything."""
    with same_random_state():
        begun = Operation(model, inplace, only, skip)
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


def _in_words(left: list[Change]) -> str:
    """The layers that were left, by reason."""
    by_reason: dict[str, list[str]] = {}
    for change in left:
        by_reason.setdefault(change.why, []).append(display_name(change.layer))
    lines = [f"{_listed(names)}: {why}" for why, names in by_reason.items()]
    count = "A layer that was asked for is" if len(left) == 1 else f"{len(left)} layers that were asked for are"
    return "\n  ".join([f"{count} left as before (see .skipped; skip= leaves layers without a warning):", *lines])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
