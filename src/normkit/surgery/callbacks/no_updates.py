"""Norms whose statistics stand still in parts of a training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, get_args

from torch import nn

from normkit.errors import ArgumentError, did_you_mean
from normkit.frameworks import LoopCallback
from normkit.hooks import hooked
from normkit.surgery.callbacks.options import kept, must_count
from normkit.surgery.no_updates import no_updates
from normkit.surgery.selection import Patterns

Phase = Literal["sanity", "validation"]
Epochs = Collection[int] | Callable[[int], bool]


class NoUpdates(LoopCallback):
    """Keeps forwards from writing running statistics in parts of a training, as `no_updates` does in a block.

    Args:
        epochs: the epochs in which nothing is written, the first being 0; or a function that says of one whether.
        phases: "validation", and "sanity", Lightning's check before training: for layers in training mode there.
        after: how many forwards of a part of the model write in each batch, by the part's name, "" for the model:
            {"critic": 2} for a critic whose third forward, on interpolated examples, is that of a gradient penalty.
        only: names or shell patterns of layers: only these, and what is inside them, keep their statistics. Without it
            those of the part, for `after`, and otherwise all.
        skip: names or shell patterns of layers that write theirs as always.
    """

    def __init__(
        self,
        *,
        epochs: Epochs = (),
        phases: Phase | Collection[Phase] = (),
        after: Mapping[str, int] | None = None,
        only: Patterns | None = None,
        skip: Patterns | None = None,
    ) -> None:
        self._epochs = epochs if callable(epochs) else _numbers(epochs)
        self._phases = _phases(phases)
        self._after = dict(after or {})
        for name, count in self._after.items():
            must_count(f"after[{name!r}]", count, "a number of forwards, at least", least=0)
        if not (callable(epochs) or self._epochs or self._phases or self._after):
            raise ArgumentError("NoUpdates needs epochs=, phases= or after=, to know when nothing is to be written.")
        self._only, self._skip = kept(only), kept(skip)
        self._open: dict[str, ExitStack] = {}
        self._forwards: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no blocks open: they belong to the model that is trained."""
        return vars(self) | {"_open": {}, "_forwards": {}}

    def on_start(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Begin to count forwards."""
        self.on_error(model)
        parts = dict(model.named_modules())
        for name in self._after:
            if name not in parts:
                raise ArgumentError(f"after={{{name!r}: ...}} names no part of this model.{did_you_mean(name, parts)}")
        counted = hooked(after=[(parts[name], self._counting(model, name)) for name in self._after])
        self._stack("counting").enter_context(counted)

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        """Stop writing for this epoch, or write again."""
        self._close("epoch")
        if self._epochs(epoch) if callable(self._epochs) else epoch in self._epochs:
            self._hold(model, "epoch")

    def on_batch(self, model: nn.Module) -> None:
        """Write again, and count forwards anew."""
        self._close("batch")
        self._forwards = dict.fromkeys(self._after, 0)
        for name, count in self._after.items():
            if count == 0:
                self._hold(model, "batch", name)

    def on_validation(self, model: nn.Module, batches: Iterable[Any] | None = None, *, is_sanity: bool = False) -> None:
        """Stop writing, if that was asked for."""
        if ("sanity" if is_sanity else "validation") in self._phases:
            self._hold(model, "validation")

    def on_validation_end(self, model: nn.Module) -> None:
        """Write again."""
        self._close("validation")

    def on_error(self, model: nn.Module) -> None:
        """Write again, and count no more."""
        for part in list(self._open):
            self._close(part)

    def _counting(self, model: nn.Module, name: str) -> Any:
        def count(*_: object) -> None:
            self._forwards[name] = self._forwards.get(name, 0) + 1
            if self._forwards[name] == self._after[name]:
                self._hold(model, "batch", name)

        return count

    def _hold(self, model: nn.Module, why: str, part: str = "") -> None:
        only = part or None if self._only is None else self._only
        self._stack(why).enter_context(no_updates(model, only=only, skip=self._skip))

    def _stack(self, why: str) -> ExitStack:
        return self._open.setdefault(why, ExitStack())

    def _close(self, why: str) -> None:
        self._open.pop(why, ExitStack()).close()


def _numbers(epochs: Iterable[int]) -> Collection[int]:
    found = epochs if isinstance(epochs, range) else tuple(epochs) if isinstance(epochs, Iterable) else (epochs,)
    if not all(isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 0 for epoch in found):
        raise ArgumentError(f"epochs= needs numbers of epochs, or a function of one; got {epochs!r}.")
    return found


def _phases(phases: Phase | Collection[Phase]) -> tuple[str, ...]:
    found = (phases,) if isinstance(phases, str) else tuple(phases)
    for phase in found:
        if phase not in get_args(Phase):
            raise ArgumentError(
                f'phases= needs "sanity" or "validation", or both; got {phase!r}.{did_you_mean(phase, get_args(Phase))}'
            )
    return found
