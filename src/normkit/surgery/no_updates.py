"""Forwards in training mode that leave no trace in the stored statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.named_layers import named_layers
from normkit.spec import describe
from normkit.surgery.norms import STATISTICS


@contextmanager
def no_updates(model: nn.Module) -> Iterator[None]:
    """Inside the block no forward writes running statistics; outputs and gradients are those of training.

    While a layer runs it has copies of its buffers, and then gets its own back: these are never written to, so that a
    backward that is still to come finds them as it left them. Holds for every norm with buffers, ours, torch's and
    others', for all threads, and for what activation checkpointing repeats inside the block. What torch.compile has
    compiled runs uncompiled here, since compiled code takes no notice of hooks.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"no_updates needs a torch.nn.Module; got a {type(model).__name__}.")
    lent = _Lent()
    handles = []
    try:
        for layer in _keepers_of_statistics(model):
            # Around the forward itself: other hooks see the layer's own, and blocks inside blocks end in their order.
            handles.append(layer.register_forward_pre_hook(lent.begin))
            handles.append(layer.register_forward_hook(lent.end, prepend=True, always_call=True))
        with uncompiled():
            yield
    finally:
        for handle in handles:
            handle.remove()
        lent.end_all()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code as the Python it was made from, whose layers call their hooks."""
    is_loaded = "torch._dynamo" in sys.modules  # before it is, nothing has been compiled
    with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
        yield


def _keepers_of_statistics(model: nn.Module) -> list[nn.Module]:
    """The norms that have buffers, and whatever else has some of those names."""
    layers = [layer for _, layer in named_layers(model) if layer._buffers]
    scripted = next((layer for layer in layers if isinstance(layer, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ArgumentError(
            f"no_updates cannot reach into a scripted {scripted.original_name}; pass the model it was made from."
        )
    return [
        layer for layer in layers if not layer._buffers.keys().isdisjoint(STATISTICS) or describe(layer) is not None
    ]


class _Lent:
    """The layers that are running with copies, and what they are to get back."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[nn.Module, dict[str, Tensor | None]]] = {}
        self._depth: dict[int, int] = {}  # a layer may be entered again, by itself or another thread
        self._lock = Lock()

    def begin(self, layer: nn.Module, args: Any) -> None:
        with self._lock:
            key = id(layer)
            self._depth[key] = self._depth.get(key, 0) + 1
            if self._depth[key] == 1:
                self._own[key] = layer, dict(layer._buffers)
                layer._buffers.update({name: _copy(buffer) for name, buffer in layer._buffers.items()})

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        with self._lock:
            key = id(layer)
            if key not in self._own:  # a hook before ours failed
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
    if buffer is None or buffer.requires_grad:  # what is learned is no running statistic
        return buffer
    return buffer.detach().clone()
