"""A mask for the norms of a model that knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.hooks import hooked
from normkit.surgery.masked.calls import Calls
from normkit.surgery.masked.given import Given
from normkit.surgery.masked.known import ToLength
from normkit.surgery.no_updates import uncompiled

__all__ = ["masked"]

_in_blocks: set[int] = set()  # the ids of the layers that are masked now
_lock = Lock()


@contextmanager
def masked(
    model: nn.Module,
    mask: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    dim: int | None = None,
    to_length: ToLength | None = None,
) -> Iterator[None]:
    """Inside the block, calls of the model compute for a padded batch what its examples give unpadded.

    Batch, group and instance norms, torch's and ours, take their statistics of the real positions, in training and in
    evaluation. Convolutions and pools find at the end of an example what they find there without padding. The mask is
    followed through every operator, and where one of them changes the length, the mask changes with it.

    What reads all positions at once (attention, recurrent layers, means that the model computes itself) is not changed:
    it needs a mask of its own. Layers over channels alone, such as LayerNorm, need none.

    Args:
        model: of any kind; it may itself be a norm.
        mask: true where the model's input is real: (N, L), or (N, ...) with several dimensions of positions.
        lengths: instead of a mask: how many positions of each example are real, the first ones.
        dim: the dimension of positions that is masked, counted from the end, where there are several: in maps
            (N, C, ...) and, with `lengths`, in the model's first input. -1 unless given; in (N, C, L) it is L.
        to_length: (mask, length) -> the mask at that length, or None if nothing is padding there. Called for a length
            that cannot be worked out from the mask, which is an error without it.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"masked needs a torch.nn.Module; got a {type(model).__name__}.")
    if to_length is not None and not callable(to_length):
        raise ArgumentError(f"to_length= must be a function (mask, length) -> mask; got a {type(to_length).__name__}.")
    calls = Calls(model, Given(mask, lengths, dim), to_length)
    _check_norms(model, calls)
    before, after = [(layer, calls.enter) for layer in calls.layers], [(layer, calls.leave) for layer in calls.layers]
    with _alone(calls):
        try:
            with hooked(before=before, after=after, first=True, always=True), uncompiled():
                yield
        finally:
            calls.end()


def _check_norms(model: nn.Module, calls: Calls) -> None:
    scripted = next((layer for layer in calls.layers if isinstance(layer, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ArgumentError(
            f"masked cannot follow a mask through a scripted {scripted.original_name}; pass the model it was made from."
        )
    if not any(calls.roles.values()):
        raise ArgumentError(
            f"masked found no norm in this {type(model).__name__} that a mask changes, no batch, group or instance "
            "norm. Norms over the channels of each position need none."
        )


@contextmanager
def _alone(calls: Calls) -> Iterator[None]:
    """A layer has one mask at a time; parts of a model that share no layer may have each their own."""
    layers = {id(layer) for layer in calls.layers}
    with _lock:
        if layers & _in_blocks:
            raise ArgumentError("this model, or a part of it, is masked already. Leave that block first.")
        _in_blocks.update(layers)
    try:
        yield
    finally:
        with _lock:
            _in_blocks.difference_update(layers)
