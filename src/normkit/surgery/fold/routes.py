"""The way of values from one layer to another: which operators they pass, and which channel each ends up in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.batches import tensors_in
from normkit.errors import NormkitError
from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.operators import AVERAGES, LIKE, MAKES, MOVES, PADS, PRODUCTS

NOTHING = -1  # the channel of a zero that was padded


class Obstacle(NormkitError):  # no error: it becomes the reason that a norm is left alone
    """Why values do not get from one layer to another as they should."""


def carries(event: Event) -> bool:
    """Whether an operator only moves or averages values."""
    name = event.operator
    if name == "_to_copy" and not event.outputs[0].is_floating_point():
        return False
    return name in MOVES or name in AVERAGES or name in PADS


def _lets_through(event: Event, passable: Collection[str]) -> bool:
    """Whether values come out as they went in, but for their place: also of a norm that is folded, and adds nothing."""
    return carries(event) if event.norm is None else event.norm in passable and len(event.inputs) == 1


class Route(NamedTuple):
    """Operators in their order, the tensors they begin with, each with its channel dimension, and end with."""

    events: list[Event]
    starts: list[tuple[Tensor, int]]
    ends: list[Tensor]

    def channels(self) -> list[Tensor]:
        """For each end, the channel that every value in it comes from, counted through all starts; or NOTHING.

        Dimensions along which it is the same may have shrunk to one.
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
            except RuntimeError as error:  # labels lie in memory as the values did, but for layouts that leave gaps
                raise Obstacle(f"{event} could not be followed: {error}") from None
        return [_decoded(env[id(end)], labels) for end in self.ends]

    def _direct(self) -> list[tuple[Tensor, int]]:
        dims = {id(start): dim for start, dim in self.starts}
        return [(end, dims[id(end)]) for end in self.ends]


def _along(per_channel: Tensor, like: Tensor, dim: int) -> Tensor:
    """One value for each channel, in as many dimensions as another tensor has."""
    return per_channel.reshape([-1 if d == dim % like.dim() else 1 for d in range(like.dim())])


def _labels(count: int, device: torch.device) -> Tensor:
    """One number for each channel, in order, such that no average of several is likely to be another's."""
    jitter = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (1 + (torch.arange(count, dtype=torch.float64) + jitter / 2) / max(count, 1)).to(device)


def _spread(per_channel: Tensor, like: Tensor, dim: int) -> Tensor:
    return torch.empty_like(like, dtype=per_channel.dtype).copy_(_along(per_channel, like, dim))


def _decoded(values: Tensor, labels: Tensor) -> Tensor:
    place = torch.searchsorted(labels, values.contiguous() - 1e-9).clamp(max=len(labels) - 1)
    known = (labels[place] - values).abs() < 1e-9
    if not (known | (values == 0)).all():
        raise Obstacle("channels are mixed in between")
    return torch.where(known, place, NOTHING)


def _repeat(event: Event, env: dict[int, Tensor]) -> None:
    """Do to the labels what an operator did to the values."""
    name = event.operator
    if event.norm is not None or name == "_to_copy":
        outputs: Any = torch.empty_like(event.outputs[0], dtype=torch.float64).copy_(env[id(event.inputs[0])])
    elif name in LIKE:
        outputs = torch.zeros_like(event.outputs[0], dtype=torch.float64)
    else:
        args, kwargs = _replaced(event.args, env), _replaced(event.kwargs, env)
        outputs = event.func(*args, **kwargs)
    for old, new in zip(event.outputs, tensors_in(outputs), strict=True):
        env[id(old)] = new


def _replaced(value: Any, env: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):  # what comes from elsewhere has the label of nothing
        return env[id(value)] if id(value) in env else torch.zeros_like(value, dtype=torch.float64)
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, env) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, env) for key, item in value.items()}
    return value


def way_back(flow: Flow, tensor: Tensor, stops: Collection[int], passable: Collection[str]) -> list[Event]:
    """The events between those that `stops` has by index and a tensor that comes of them alone.

    The stops are in the list. Norm layers of `passable` are as good as not there.
    """
    found: dict[int, Event] = {}
    waiting = [tensor]
    while waiting:
        wanted = waiting.pop()
        event = flow.maker(wanted)
        if event is None:
            raise Obstacle("its input does not come from a layer")
        if event.index in found:
            continue
        found[event.index] = event
        if event.index in stops:
            continue
        if event.operator in PRODUCTS:
            raise Obstacle(f"its input comes from {event}, whose weight is no parameter as it is")
        if not _lets_through(event, passable):
            raise Obstacle(f"its input comes from {event}")
        waiting += event.inputs
    return [found[index] for index in sorted(found)]


def way_on(flow: Flow, call: Event, stops: Collection[int], passable: Collection[str]) -> list[Event]:
    """The events that a norm layer's output goes to, until all of it is in those that `stops` has by index.

    The stops are in the list.
    """
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
        raise Obstacle(f"its output goes to {event}")
    return event.outputs


def _filled(flow: Flow, event: Event, found: dict[int, Event]) -> list[Tensor]:
    into = event.args[0]
    made = [e for e in flow.events if any(memory_of(t) == memory_of(into) for t in e.outputs)]
    for other in made:
        if other.index > event.index:
            break
        if other.operator not in MAKES | {"slice", "copy_"}:
            raise Obstacle(f"its output is written over what {other} made")
        found[other.index] = other
    return [into]


def stay_inside(flow: Flow, tensors: Iterable[Tensor], events: Collection[int]) -> None:
    """Refuse tensors that anybody outside these events reads, keeps or gives out."""
    for tensor in tensors:
        _check_unseen(flow, tensor)
        for event in outside(flow, tensor, events):
            raise used_by(event)


def _check_unseen(flow: Flow, tensor: Tensor) -> None:
    memory = memory_of(tensor)
    if memory in flow.given_out:
        raise Obstacle("what is between them is part of the model's output")
    if memory in flow.kept:
        raise Obstacle(f"what is between them is kept by {flow.kept[memory] or 'the model'}")


def outside(flow: Flow, tensor: Tensor, events: Collection[int]) -> list[Event]:
    """The readers of a tensor that are not among these events."""
    return [event for event in flow.readers(tensor) if event.index not in events and event.operator not in LIKE]


def used_by(event: Event) -> Obstacle:
    """That somebody else reads what is between two layers."""
    return Obstacle(f"what is between them is also used by {event}")


class Aside(NamedTuple):
    """Where values go besides: operators that only move them, all tensors they are in, and who reads those."""

    events: list[Event]
    tensors: list[Tensor]
    readers: list[Event]


def ways_aside(flow: Flow, tensors: Iterable[Tensor], events: Collection[int]) -> Aside:
    """Follow values that leave a route; they must not leave the model, or stay in it."""
    found: dict[int, Event] = {}
    readers: dict[int, Event] = {}
    known = list(tensors)
    for tensor in known:  # grows on the way
        _check_unseen(flow, tensor)
        for event in outside(flow, tensor, {*events, *found}):
            if event.norm is None and carries(event):
                found[event.index] = event
                known += event.outputs
            else:
                readers[event.index] = event
    return Aside([found[index] for index in sorted(found)], known, list(readers.values()))
