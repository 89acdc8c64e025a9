"""Norms that are synchronized while several processes train a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from normkit.frameworks import LoopCallback
from normkit.surgery.callbacks.options import kept
from normkit.surgery.norms import norms
from normkit.surgery.replace.convert import convert
from normkit.surgery.selection import Patterns


class SyncNorms(LoopCallback):
    """Makes batch norms synchronize over all processes, before DistributedDataParallel wraps the model.

    They are normkit's SyncBatchNorms, on CPUs as on GPUs; where a single process trains they are BatchNorms.

    Args:
        back: when training ends, make them BatchNorms again, torch's or ours, as they were.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
    """

    def __init__(self, *, back: bool = False, only: Patterns | None = None, skip: Patterns | None = None) -> None:
        self._back, self._only, self._skip = back, kept(only), kept(skip)
        self._synced: dict[str, list[str]] = {}  # by whose classes they had

    def on_setup(self, model: nn.Module) -> None:
        """Convert."""
        before = {norm.name: type(norm.layer) for norm in norms(model)}
        for change in convert(model, "sync", only=self._only, skip=self._skip, inplace=True).changed:
            is_torch = before[change.layer].__module__.startswith("torch.")
            self._synced.setdefault("torch" if is_torch else "normkit", []).append(change.layer)

    def on_start(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Convert what is not converted yet."""
        self.on_setup(model)

    def on_error(self, model: nn.Module) -> None:
        """Convert back what was converted here, if that was asked for."""
        synced, self._synced = self._synced, {}
        if self._back:
            for classes, names in synced.items():
                convert(model, "batch", classes=classes, only=names, inplace=True)  # type: ignore[arg-type]
