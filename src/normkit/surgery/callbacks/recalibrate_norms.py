"""Norms that get the statistics of the population when a model has been trained."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader

from normkit.batches import Forward, repeatable
from normkit.errors import ArgumentError
from normkit.frameworks import LoopCallback
from normkit.moments import PopulationMethod
from normkit.surgery.callbacks.options import kept, must_count
from normkit.surgery.result import Change
from normkit.surgery.selection import Patterns
from normkit.surgery.statistics.recalibrate import recalibrate


class RecalibrateNorms(LoopCallback):
    """Gives norms the population's statistics at the end of training, and before validations if asked.

    The weights are those of the training without it, bit for bit: neither the random states nor the order of the
    batches change.

    Attributes:
        changed: what the last recalibration did, layer by layer; None before the first.

    Args:
        batches: to estimate statistics on; without it, the batches of training, in an order of their own.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        max_batches: the number of batches to use at most; without it, all.
        before_validation: recalibrate before every validation, too, so that it, and what is saved after it, has
            population statistics. Training goes on from there.
        method: "pooled" or "paper", as of `recalibrate`.
        exact: layer by layer, as of `recalibrate`.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
    """

    def __init__(
        self,
        batches: Iterable[Any] | None = None,
        forward: Forward | None = None,
        *,
        max_batches: int | None = None,
        before_validation: bool = False,
        method: PopulationMethod = "pooled",
        exact: bool = False,
        only: Patterns | None = None,
        skip: Patterns | None = None,
    ) -> None:
        if max_batches is not None:
            must_count("max_batches", max_batches, "at least")
        if method not in get_args(PopulationMethod):
            raise ArgumentError(f'method must be "pooled" or "paper"; got {method!r}.')
        self._batches = None if batches is None else repeatable(batches, "RecalibrateNorms")
        self._forward, self._most, self._before_validation = forward, max_batches, before_validation
        self._options = {"method": method, "exact": exact, "only": kept(only), "skip": kept(skip)}
        self.changed: list[Change] | None = None

    def on_start(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Raise now what would otherwise be raised when training has ended."""
        self._chosen(batches)
        if self._forward is None and _has_no_forward(model):
            raise ArgumentError(
                f"RecalibrateNorms needs a way to run the model on a batch, and {type(model).__name__} has no forward "
                "of its own. Write one, or pass forward=lambda module, batch: module.net(batch[0])."
            )

    def on_validation(self, model: nn.Module, batches: Iterable[Any] | None = None, *, is_sanity: bool = False) -> None:
        """Recalibrate, if that was asked for; not before the sanity check, which comes before all training."""
        if self._before_validation and not is_sanity:
            self._recalibrate(model, batches)

    def on_end(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Recalibrate."""
        self._recalibrate(model, batches)

    def _recalibrate(self, model: nn.Module, batches: Iterable[Any] | None) -> None:
        chosen = _Again(self._chosen(batches), self._most)
        with torch.inference_mode(False):  # Lightning validates in it; what is stored has to outlive that
            done = recalibrate(model, chosen, self._forward, inplace=True, **self._options)  # type: ignore[arg-type]
        self.changed = list(done.changed)

    def _chosen(self, batches: Iterable[Any] | None) -> Iterable[Any]:
        chosen = batches if self._batches is None else self._batches
        if chosen is None or isinstance(chosen, Mapping | tuple) or _has_loaders(chosen):
            got = "none" if chosen is None else f"a {type(chosen).__name__}"
            raise ArgumentError(
                f"RecalibrateNorms needs one loader of batches, and the training has {got}. Pass batches=loader."
            )
        if self._batches is None and self._most is None and not _has_length(chosen):
            raise ArgumentError(
                f"RecalibrateNorms needs max_batches= here: the training's {type(chosen).__name__} has no length, and "
                "so perhaps no end."
            )
        return chosen


class _Again:
    """Batches that can be gone over while somebody else is going over them, and after which nothing else differs."""

    def __init__(self, batches: Iterable[Any], most: int | None) -> None:
        self._batches, self._most = batches, most

    def __iter__(self) -> Iterator[Any]:
        loader = getattr(self._batches, "base_dataloader", self._batches)  # accelerate's own counts where it is
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader._iterator = None  # persistent workers go on with what they were doing
        with _same_generators(loader):
            yield from islice(loader, self._most)


@contextmanager
def _same_generators(loader: Any) -> Iterator[None]:
    """Give the random generators of a loader and its samplers the state back that they had."""
    sampler, of_batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = (loader, sampler, of_batches, getattr(of_batches, "sampler", None))
    found = {id(g): g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _has_loaders(batches: Iterable[Any]) -> bool:
    return isinstance(batches, list) and any(isinstance(one, DataLoader) for one in batches)


def _has_length(batches: Any) -> bool:
    try:
        len(batches)
    except TypeError:  # of a loader whose data set has none
        return False
    return True


def _has_no_forward(model: nn.Module) -> bool:
    """Whether its forward is the one that a class of modules has by itself, which only raises."""
    return type(model).forward.__module__.startswith(("torch.nn.modules.module", "lightning.", "pytorch_lightning."))
