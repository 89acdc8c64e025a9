"""Routes of values from one layer to another: the operators they pass, and the channel each ends up in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.batches import map_leaves, tensors_in
from normkit.named_layers import display_name
from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.operators import AVERAGES, LIKE, MAKES, MOVES, PADS, PRODUCTS
from normkit.surgery.operation import Skip

NOTHING = -1  # the channel of a padded zero


def carries(event: Event) -> bool:
    """Whether an operator only moves or averages values."""
    name = event.operator
    if name == "_to_copy" and not event.outputs[0].is_floating_point():
        return False
    return name in MOVES or name in AVERAGES or name in PADS


def _lets_through(event: Event, passable: Collection[str]) -> bool:
    """Whether an operator, or a norm that is folded and adds nothing, changes only the places of values."""
    return carries(event) if event.norm is None else event.norm in passable and len(event.inputs) == 1


class Route(NamedTuple):
    """Operators in their order, the tensors they start from, each with its channel dimension, and those they end in."""

    events: list[Event]
    starts: list[tuple[Tensor, int]]
    ends: list[Tensor]

    def channels(self) -> list[Tensor]:
        """For each end, the channel that every value in it comes from, or NOTHING; channels count through all starts.

        Dimensions along which the channel is the same may have size one.
        """
        if not self.events:
            return [_along(torch.arange(end.shape[dim], device=end.device), end, dim) for end, dim in self._direct()]
        counts = [start.shape[dim] for start, dim in self.starts]
        labels = _labels(sum(counts), self.starts[0][0].device)
        env: dict[int, Tensor] = {}
        for (start, dim), own in zip(self.starts, labels.split(counts), strict=True):
            env[id(start)] = _spread(own, start, dim)
        for event in self.events:
            try:
                _repeat(event, env)
            except RuntimeError as error:  # labels have the memory layout of the values, except for layouts with gaps
                raise Skip(f"{event} could not be followed: {error}") from None
        return [_decoded(env[id(end)], labels) for end in self.ends]

    def _direct(self) -> list[tuple[Tensor, int]]:
        dims = {id(start): dim for start, dim in self.starts}
        return [(end, dims[id(end)]) for end in self.ends]


def _along(per_channel: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshape one value per channel so that it broadcasts against another tensor."""
    return per_channel.reshape([-1 if d == dim % like.dim() else 1 for d in range(like.dim())])


def _labels(count: int, device: torch.device) -> Tensor:
    """One number for each channel, increasing, such that an average of several is hardly ever the number of another."""
    jitter = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (1 + (torch.arange(count, dtype=torch.float64) + jitter / 2) / max(count, 1)).to(device)


def _spread(per_channel: Tensor, like: Tensor, dim: int) -> Tensor:
    return torch.empty_like(like, dtype=per_channel.dtype).copy_(_along(per_channel, like, dim))


def _decoded(values: Tensor, labels: Tensor) -> Tensor:
    place = torch.searchsorted(labels, values.contiguous() - 1e-9).clamp(max=len(labels) - 1)
    known = (labels[place] - values).abs() < 1e-9
    if not (known | (values == 0)).all():
        raise Skip("channels are mixed in between")
    return torch.where(known, place, NOTHING)


def _repeat(event: Event, env: dict[int, Tensor]) -> None:
    """Apply to the labels the operator that was applied to the values."""
    name = event.operator
    if event.norm is not None or name == "_to_copy":
        outputs: Any = torch.empty_like(event.outputs[0], dtype=torch.float64).copy_(env[id(event.inputs[0])])
    elif name in LIKE:
        outputs = torch.zeros_like(event.outputs[0], dtype=torch.float64)
    else:
        args, kwargs = map_leaves((event.args, event.kwargs), lambda leaf: _label(leaf, env))
        outputs = event.func(*args, **kwargs)
    for old, new in zip(event.outputs, tensors_in(outputs), strict=True):
        env[id(old)] = new


def _label(argument: Any, env: dict[int, Tensor]) -> Any:
    """The argument of an operator on labels in the place of its argument on values."""
    if isinstance(argument, Tensor):  # a tensor from elsewhere has no channel: zero, as padding
        return env[id(argument)] if id(argument) in env else torch.zeros_like(argument, dtype=torch.float64)
    return torch.float64 if isinstance(argument, torch.dtype) else argument


def events_back(flow: Flow, tensor: Tensor, stops: Collection[int], passable: Collection[str]) -> list[Event]:
    """The events from those with an index in `stops`, which are included, to a tensor that comes from them alone.

    Norm layers in `passable` are folded already, and count as absent.
    """
    found: dict[int, Event] = {}
    waiting = [tensor]
    while waiting:
        wanted = waiting.pop()
        event = flow.maker(wanted)
        if event is None:
            raise Skip("its input does not come from a layer")
        if event.index in found:
            continue
        found[event.index] = event
        if event.index in stops:
            continue
        if event.operator in PRODUCTS:
            raise Skip(f"its input comes from {event}, whose weight is not a parameter itself")
        if not _lets_through(event, passable):
            raise Skip(f"its input comes from {event}")
        waiting += event.inputs
    return [found[index] for index in sorted(found)]


def events_on(flow: Flow, call: Event, stops: Collection[int], passable: Collection[str]) -> list[Event]:
    """The events that a norm layer's output goes to, up to those with an index in `stops`, which are included."""
    found: dict[int, Event] = {}
    waiting = list(call.outputs)
    seen: set[int] = set()
    while waiting:
        memory = memory_of(tensor := waiting.pop())
        if memory in seen:
            continue
        seen.add(memory)
        for event in flow.readers(tensor):
            if event.index in found or event is call:
                continue
            found[event.index] = event
            if event.index in stops:
                continue
            waiting += _passed_on(flow, event, passable, found)
    return [found[index] for index in sorted(found)]


def _passed_on(flow: Flow, event: Event, passable: Collection[str], found: dict[int, Event]) -> list[Tensor]:
    if event.operator == "copy_":  # circular padding fills new memory piece by piece
        return _filled(flow, event, found)
    if event.operator in LIKE:
        return []
    if not _lets_through(event, passable):
        raise Skip(f"its output goes to {event}")
    return event.outputs


def _filled(flow: Flow, event: Event, found: dict[int, Event]) -> list[Tensor]:
    into = event.args[0]
    made = [e for e in flow.events if any(memory_of(t) == memory_of(into) for t in e.outputs)]
    for other in made:
        if other.index > event.index:
            break
        if other.operator not in MAKES | {"slice", "copy_"}:
            raise Skip(f"its output is written over what {other} made")
        found[other.index] = other
    return [into]


def must_stay_inside(flow: Flow, tensors: Iterable[Tensor], events: Collection[int]) -> None:
    """Skip if one of the tensors is read outside these events, kept by a layer, or part of the model's output."""
    for tensor in tensors:
        _must_be_unseen(flow, tensor)
        for event in outside(flow, tensor, events):
            raise used_by(event)


def _must_be_unseen(flow: Flow, tensor: Tensor) -> None:
    memory = memory_of(tensor)
    if memory in flow.given_out:
        raise Skip("what is between them is part of the model's output")
    if memory in flow.kept:
        raise Skip(f"what is between them is kept by {display_name(flow.kept[memory])}")


def outside(flow: Flow, tensor: Tensor, events: Collection[int]) -> list[Event]:
    """The readers of a tensor that are not among these events."""
    return [event for event in flow.readers(tensor) if event.index not in events and event.operator not in LIKE]


def used_by(event: Event) -> Skip:
    """The reason that another operator reads what is between two layers."""
    return Skip(f"what is between them is also used by {event}")


class Branches(NamedTuple):
    """Where values also go: operators that only move them, all tensors they are in, and the readers of those."""

    events: list[Event]
    tensors: list[Tensor]
    readers: list[Event]


def branches(flow: Flow, tensors: Iterable[Tensor], events: Collection[int]) -> Branches:
    """Follow values that leave a route; they must not be part of the model's output, or kept by a layer."""
    found: dict[int, Event] = {}
    readers: dict[int, Event] = {}
    known = list(tensors)
    for tensor in known:  # grows in the loop
        _must_be_unseen(flow, tensor)
        for event in outside(flow, tensor, {*events, *found}):
            if event.norm is None and carries(event):
                found[event.index] = event
                known += event.outputs
            else:
                readers[event.index] = event
    return Branches([found[index] for index in sorted(found)], known, list(readers.values()))
