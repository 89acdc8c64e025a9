"""The ranks of the default process group: what each of them has, and whether they fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from torch import distributed, nn

from normkit.errors import DistributedError
from normkit.layers.absent_ranks import who_was_absent
from normkit.named_layers import display_name

T = TypeVar("T")

Facts = Mapping[str, Sequence[str]]  # lines, under a name for them


def world_size() -> int:
    """How many processes there are in the default group; 1 without a group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks as messages give them: "rank 2", "ranks 0, 1, 3"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def gathered(value: T, caller: str) -> list[T]:
    """What every rank has, in the order of ranks. All must call it; `caller` names what they were asked to call."""
    count = world_size()
    if count == 1:
        return [value]
    every: list[Any] = [None] * count
    start = time.monotonic()
    try:
        distributed.all_gather_object(every, value)
    except RuntimeError as error:
        absent = who_was_absent(None, time.monotonic() - start)
        raise DistributedError(
            f"{caller} needs all {count} ranks of the process group: {absent} ({error}). Call it on every rank."
        ) from error
    return every


def together(make: Callable[[], T], caller: str, gather: Callable[[Any], list[Any]] | None = None) -> T:
    """What this rank makes, while all do. If one fails, all raise, so that none is left waiting for it.

    `gather` exchanges what failed, where that is not for the default group.
    """
    if world_size() == 1:
        return make()
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # whatever it is: the other ranks wait
        failure = error
    own = None if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = gathered(own, caller) if gather is None else gather(own)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise DistributedError(f"{caller} failed on rank {rank}, and with it on all: {reason}")
    return made  # type: ignore[return-value]


def must_agree(every: Sequence[Facts], advice: str) -> None:
    """Raise if the facts of one rank are not those of the first; all ranks that were given the same raise the same."""
    first = every[0]
    for theirs in every[1:]:
        for name, lines in first.items():
            for index, (a, b) in enumerate(zip_longest(lines, theirs[name], fillvalue="nothing")):
                if a != b:
                    here = {rank: _line(facts[name], index) for rank, facts in enumerate(every)}
                    sides = ((line, [rank for rank, found in here.items() if found == line]) for line in (a, b))
                    said = ", ".join(f"{named_ranks(on)} {'has' if len(on) == 1 else 'have'} {li}" for li, on in sides)
                    raise DistributedError(f"All ranks need the same {name}; {said}. {advice}")


def structure_of(model: nn.Module) -> dict[str, list[str]]:
    """What must be the same for a model to be one model on all ranks: tensors by name and shape, and its layers."""
    layers = dict(model.named_modules())
    return {
        "parameters and buffers": [line for name, layer in layers.items() for line in _tensors_of(name, layer)],
        "layers": [
            f"{display_name(name)}: {type(layer).__name__}({layer.extra_repr()})" for name, layer in layers.items()
        ],
    }


def _tensors_of(name: str, layer: nn.Module) -> list[str]:
    own = (*layer.named_parameters(name, recurse=False), *layer.named_buffers(name, recurse=False))
    return [f"{tensor_name} of {tuple(tensor.shape)}, {tensor.dtype}" for tensor_name, tensor in own]


def must_be_one_model(model: nn.Module, caller: str) -> None:
    """Raise on all ranks, before anything else is exchanged, if one of them holds another model."""
    if world_size() > 1:
        every = gathered(structure_of(model), caller)
        must_agree(every, f"{caller} takes one model, of which every rank has a copy.")


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "nothing"
