"""Forwards in training mode that do not write the stored statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.hooks import hooked
from normkit.named_layers import named_layers
from normkit.spec import describe
from normkit.surgery.norms import STATISTICS
from normkit.surgery.selection import Patterns, Selection


@contextmanager
def no_updates(model: nn.Module, *, only: Patterns | None = None, skip: Patterns | None = None) -> Iterator[None]:
    """Inside the block no forward writes running statistics; outputs and gradients are those of training.

    While a layer runs it has copies of its buffers, and gets its own back afterwards. These are never written to, so a
    later backward finds them unchanged. This holds for every norm with buffers, whichever library it comes from, in
    all threads, and for the forwards that activation checkpointing repeats inside the block. Compiled models run
    uncompiled in the block, because compiled code does not call hooks.

    Args:
        model: of any kind; it may itself be a norm.
        only: names or shell patterns of layers: only these, and what is inside them, keep their statistics.
        skip: names or shell patterns of layers that write theirs as always.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"no_updates needs a torch.nn.Module; got a {type(model).__name__}.")
    loans = _Loans()
    layers = _with_statistics(model, Selection(model, only, skip))
    before, after = [(layer, loans.begin) for layer in layers], [(layer, loans.end) for layer in layers]
    try:
        # Right around the forward: other hooks see the layer's own buffers, and nested blocks end in their order.
        with hooked(before=before, after=after, first=True, always=True), uncompiled():
            yield
    finally:
        loans.end_all()


_forcing = ExitStack()  # what lets go of torch's stance again
_blocks = 0  # that are uncompiled now
_lock = Lock()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models as the Python they were compiled from, whose layers call their hooks.

    Blocks may end in another order than they began, as those of callbacks do: the last to end lets go.
    """
    global _blocks
    if "torch._dynamo" not in sys.modules:  # before it is loaded, nothing has been compiled
        yield
        return
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _forcing.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _forcing.close()


def _with_statistics(model: nn.Module, selection: Selection) -> list[nn.Module]:
    """The norms that have buffers, and all other layers with buffers of those names; of them, what is selected."""
    layers = {name: layer for name, layer in named_layers(model) if layer._buffers}
    found = [name for name, layer in layers.items() if _may_store_statistics(layer)]
    chosen = selection.among(found, "layer of this model with statistics")
    taken = [layers[name] for name in found if name in chosen]
    scripted = next((layer for layer in taken if isinstance(layer, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ArgumentError(
            f"no_updates cannot reach into a scripted {scripted.original_name}; pass the model it was made from."
        )
    return taken


def _may_store_statistics(layer: nn.Module) -> bool:
    return (
        isinstance(layer, torch.jit.ScriptModule)  # whose class is not known
        or not layer._buffers.keys().isdisjoint(STATISTICS)
        or describe(layer) is not None
    )


class _Loans:
    """The layers that run with copies of their buffers, and the buffers to give back to them."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[nn.Module, dict[str, Tensor | None]]] = {}
        self._depth: dict[int, int] = {}  # a layer may be entered again, by itself or another thread
        self._lock = Lock()

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        with self._lock:
            key = id(layer)
            self._depth[key] = self._depth.get(key, 0) + 1
            if self._depth[key] == 1:
                self._own[key] = layer, dict(layer._buffers)
                layer._buffers.update({name: _copy(buffer) for name, buffer in layer._buffers.items()})

    def end(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with self._lock:
            key = id(layer)
            if key not in self._own:  # an earlier hook raised before `begin` was called
                return
            self._depth[key] -= 1
            if self._depth[key] == 0:
                layer._buffers.update(self._own.pop(key)[1])

    def end_all(self) -> None:
        with self._lock:
            for layer, own in self._own.values():
                layer._buffers.update(own)
            self._own.clear()


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or buffer.requires_grad:  # a learned buffer is not a running statistic
        return buffer
    return buffer.detach().clone()
