"""The calls of a model and its layers inside a block: when to follow the mask, and which norms get it how."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.batches import tensors_in
from normkit.errors import UnsupportedError
from normkit.layers.norm_layer import NormLayer
from normkit.named_layers import display_name, named_layers
from normkit.spec import describe
from normkit.surgery.masked.follow import Follow
from normkit.surgery.masked.given import Given
from normkit.surgery.masked.known import Known, ToLength
from normkit.tracing import is_recomputing

Role = Literal["ours", "torch's", "other"]

_OF_THEIR_OWN_POSITIONS = ("switchable", "evo-b0")  # also in evaluation


def role_of(layer: nn.Module) -> Role | None:
    """How a norm gets its mask: as an argument, from the operator that it calls, or not at all. None: it needs none."""
    if isinstance(layer, NormLayer) and layer._takes_mask and "mask" in inspect.signature(layer.forward).parameters:
        return "ours"
    if isinstance(layer, _BatchNorm | _InstanceNorm | nn.GroupNorm) and not isinstance(layer, NormLayer):
        return "torch's"
    spec = describe(layer)
    return "other" if spec is not None and "S" in spec.over else None


class _Running:
    """A layer that is being called."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.norms_before = 0  # how many norms had been computed when it began
        self.pauses = False  # whether its operators are not followed


class _State(threading.local):
    """What is running in one thread."""

    def __init__(self) -> None:
        self.mode: Follow | None = None
        self.running: list[_Running] = []


class Calls:
    """What is to be done before and after the forward of every layer of a model."""

    def __init__(self, model: nn.Module, given: Given, to_length: ToLength | None) -> None:
        named = list(named_layers(model))
        self.layers = [layer for _, layer in named]
        self.roles = {id(layer): role_of(layer) for layer in self.layers}
        self._titles = {id(layer): f"{display_name(name)} ({type(layer).__name__})" for name, layer in named}
        self._model, self._given, self._to_length = model, given, to_length
        self._state = _State()
        self._last: Known | None = None  # of the last call, parts of which a backward may repeat

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin to follow the mask where the model begins, and pass norms of ours theirs."""
        state = self._state
        state.running.append(_Running(layer))
        with torch._C.DisableTorchFunction():  # we are not followed ourselves
            if state.mode is None:
                known = self._begun(layer, tensors_in((args, kwargs)))
                state.mode = Follow(known, self._where)
                state.mode.__enter__()
            return self._norm_begins(layer, state.mode, args, kwargs)

    def leave(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what the layer made of the mask, and stop following it where the model ends."""
        state = self._state
        if not state.running or state.running[-1].layer is not layer:  # a hook of others raised before `enter`
            return
        try:
            with torch._C.DisableTorchFunction():
                if state.mode is not None and output is not None:
                    self._norm_ended(layer, state.mode, args, kwargs)
                    state.mode.known.inherit(tensors_in(output), tensors_in((args, kwargs)))
        finally:
            ended = state.running.pop()
            if state.mode is not None and ended.pauses:
                state.mode.paused -= 1
            if not state.running:
                self.end()

    def end(self) -> None:
        """Stop following, whatever is still running."""
        mode, self._state.mode = self._state.mode, None
        self._state.running.clear()
        if mode is not None:
            mode.__exit__(None, None, None)

    def _begun(self, layer: nn.Module, inputs: Sequence[Tensor]) -> Known:
        if layer is self._model:
            extent, fitting = self._given.fitted(inputs)
            known = Known(extent, self._given.dim, self._to_length)
            known.mark(fitting, extent)
            self._last = known  # other threads have others: this one keeps its own
            return known
        if self._last is None or not is_recomputing():
            raise UnsupportedError(
                f"{self._where()} was called by itself, or in another thread than the model that is masked: which of "
                "its positions are real is not known. Call the model, or mask the part that you call."
            )
        return self._last

    def _norm_begins(self, layer: nn.Module, mode: Follow, args: Any, kwargs: Any) -> Any:
        running, role = self._state.running[-1], self.roles.get(id(layer))
        running.norms_before = mode.norms
        if role == "other" and _reads_positions(layer):
            raise UnsupportedError(
                f"{self._where()} takes statistics of positions and no mask. Convert it first, to a norm that takes "
                'one: nk.convert(model, to="batch") or to="group", only= this layer.'
            )
        mask = None
        if role == "ours" and kwargs.get("mask") is None and _uses_batch(layer):
            mask = mode.mask_for_norm(_input(args, kwargs), across=_is_across(layer))
        if isinstance(layer, NormLayer):
            running.pauses = True
            mode.paused += 1
        return None if mask is None else (args, {**kwargs, "mask": mask})

    def _norm_ended(self, layer: nn.Module, mode: Follow, args: Any, kwargs: Any) -> None:
        if self.roles.get(id(layer)) != "torch's" or mode.norms > self._state.running[-1].norms_before:
            return
        if _uses_batch(layer) and _input(args, kwargs).dim() > 2:
            raise UnsupportedError(
                f"{self._where()} computes its statistics by other means than torch.nn.functional, where a mask would "
                'reach them. Convert it first: nk.convert(model, to="batch"), or to="sync" if it is synchronized.'
            )

    def _where(self) -> str:
        layer = self._state.running[-1].layer
        return self._titles.get(id(layer), type(layer).__name__)


def _input(args: Any, kwargs: Any) -> Tensor:
    return tensors_in((args, kwargs))[0]


def _uses_batch(layer: nn.Module) -> bool:
    spec = describe(layer)
    return spec is not None and spec.uses == "batch"


def _is_across(layer: nn.Module) -> bool:
    spec = describe(layer)
    return spec is not None and "N" in spec.over


def _reads_positions(layer: nn.Module) -> bool:
    spec = describe(layer)
    return spec is not None and (spec.uses == "batch" or spec.kind in _OF_THEIR_OWN_POSITIONS)
