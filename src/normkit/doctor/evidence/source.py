"""The user's batches: taken without moving the place where their source is, and how small the last of them will be."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from normkit.batches import each_batch
from normkit.surgery.check_export.batch_mates import batch_size

MOST = 16  # batches that are looked at: enough for every statistic that rules read

# Where data loaders keep what has a state of its own.
_PARTS = ("dataset", "sampler", "batch_sampler", "generator", "data_source")


def taken(batches: Iterable[Any], most: int = MOST) -> list[Any]:
    """The first batches; the source is left where it was, unless it is a generator, which has no way back."""
    with same_position(batches):
        return list(islice(each_batch(_own(batches)), most))


def _own(batches: Iterable[Any]) -> Iterable[Any]:
    """What can be iterated over without an effect on the iterations of others: a DataLoader keeps its workers."""
    if not isinstance(batches, DataLoader):
        return batches
    twin = copy.copy(batches)
    twin._iterator = None
    return twin


@contextmanager
def same_position(batches: Iterable[Any]) -> Iterator[None]:
    """Give a source of batches the attributes and random generators back that it has now."""
    parts = _parts(batches)
    attributes = [(part, dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    held = [value for _, state in attributes for value in state.values()]
    undo = [restore for value in (*parts, *held) if (restore := _restorer(value)) is not None]
    try:
        yield
    finally:
        for part, state in attributes:
            vars(part).clear()
            vars(part).update(state)
        for restore in undo:
            restore()


def _parts(batches: Any) -> list[Any]:
    found: dict[int, Any] = {id(batches): batches}
    for part in _growing(found):
        for name in _PARTS:
            inner = getattr(part, name, None)
            if inner is not None and not isinstance(inner, type | Tensor | nn.Module | str | int):
                found.setdefault(id(inner), inner)
    return [part for part in found.values() if not isinstance(part, Tensor | nn.Module | type)]


def _growing(found: dict[int, Any]) -> Iterator[Any]:
    """The values of a dictionary, also those that are added meanwhile."""
    index = 0
    while index < len(found):
        yield list(found.values())[index]
        index += 1


def _restorer(value: Any) -> Callable[[], object] | None:
    """What gives a random generator of torch, numpy or Python its present state back; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        own = value.getstate()
        return lambda: value.setstate(own)
    bits = getattr(value, "bit_generator", None)
    if bits is None or not hasattr(bits, "state"):
        return None
    kept = copy.deepcopy(bits.state)
    return lambda: setattr(bits, "state", kept)


def smallest_batch(batches: Iterable[Any]) -> int | None:
    """How many examples the smallest batch of one pass over the source will have; None if that is not known."""
    if isinstance(batches, Sequence):
        sizes = [size for batch in batches if (size := batch_size(batch)) is not None]
        return min(sizes, default=None)
    source: Any = batches.batch_sampler if isinstance(batches, DataLoader) else batches
    if not isinstance(source, BatchSampler):
        return None
    sampler: Any = source.sampler
    try:
        length = len(sampler)
    except TypeError:  # of an IterableDataset nobody knows how long it is
        return None
    rest = length % source.batch_size
    return source.batch_size if rest == 0 or source.drop_last else rest
