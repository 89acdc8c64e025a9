"""Norms that are frozen while a model trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from normkit.frameworks import LoopCallback
from normkit.surgery.callbacks.options import kept, must_count
from normkit.surgery.norms import norms
from normkit.surgery.replace.freeze import freeze, unfreeze
from normkit.surgery.selection import Patterns


class FreezeNorms(LoopCallback):
    """Freezes batch norms while a model trains; when it ends, they are again the layers they were.

    Without `until` the norms are frozen before the optimizer is made and DistributedDataParallel wraps the model, so
    that neither knows their gammas and betas. With it, both have to know them: the norms are frozen when training
    begins, and with affine=True DistributedDataParallel needs `find_unused_parameters=True`.

    Args:
        affine: also freeze gamma and beta. False: they learn.
        until: the epoch at whose beginning the norms are set going again; the first is 0. Without it, the end.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
    """

    def __init__(
        self,
        *,
        affine: bool = True,
        until: int | None = None,
        only: Patterns | None = None,
        skip: Patterns | None = None,
    ) -> None:
        if until is not None:
            must_count("until", until, "an epoch, the first of which is 0, so at least")
        self._affine, self._until = affine, until
        self._only, self._skip = kept(only), kept(skip)
        self._frozen: list[str] = []

    def on_setup(self, model: nn.Module) -> None:
        """Freeze, if it is for the whole training."""
        if self._until is None:
            self._freeze(model)

    def on_start(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Freeze what is not frozen yet."""
        self._freeze(model)

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        """Set the norms going again, if it is time."""
        if self._until is not None and epoch >= self._until:
            self.on_error(model)

    def on_error(self, model: nn.Module) -> None:
        """Set the norms going again that were frozen here."""
        names, self._frozen = self._frozen, []
        if names:
            unfreeze(model, only=names, inplace=True)

    def _freeze(self, model: nn.Module) -> None:
        moving = {norm.name for norm in norms(model) if norm.spec.updates != "never"}
        done = freeze(model, affine=self._affine, only=self._only, skip=self._skip, inplace=True)
        self._frozen += [change.layer for change in done.changed if change.layer in moving]
