"""Which norms can be folded into which layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.layers.norm_layer import NormLayer
from normkit.surgery.fold.affine_map import AffineMap, affine_map, channel_dim, check_kind
from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.hosts import Host, Product
from normkit.surgery.fold.routes import (
    NOTHING,
    Aside,
    Obstacle,
    Route,
    stay_inside,
    used_by,
    way_back,
    way_on,
    ways_aside,
)
from normkit.surgery.norms import Norm


@dataclass(eq=False)
class Fold:
    """A norm, and the layers that take it.

    Attributes:
        channels: for each host, the norm's channel that belongs to each of its output channels or, of a norm before
            it, its input channels; NOTHING where there is none.
        after: whether the norm comes after its hosts.
        dense: whether the norm put its values in another order in memory than it got them in.
        through: the norms, themselves folded, that are between.
        meant: the layers whose output is another from now on.
    """

    norm: Norm
    map: AffineMap
    channels: dict[Host, Tensor]
    after: bool
    dense: bool
    through: frozenset[str]
    meant: frozenset[str]

    @property
    def where(self) -> str:
        """The hosts' names."""
        return " and ".join(host.name for host in self.channels)


class Meeting(NamedTuple):
    """One product that one call of a norm meets, and how its channels belong to the norm's."""

    product: Product
    channels: Tensor
    is_padded: Tensor
    events: list[Event]
    meant: frozenset[str]


@dataclass
class Plan:
    """What is to be folded, found before anything is changed."""

    flow: Flow
    hosts: list[Host]
    folds: dict[str, Fold] = field(default_factory=dict)

    def find(self, norms: Iterable[Norm]) -> dict[str, str]:
        """Find a place for every norm, before it or else after it; return the reasons of those that have none."""
        in_order = self._in_order(norms)
        before = {norm.name: self._attempt(norm, after=True) for norm in in_order}
        left = [norm for norm in reversed(in_order) if norm.name not in self.folds]
        behind = {norm.name: self._attempt(norm, after=False) for norm in left}
        reasons = {name: (before[name], behind[name]) for name in behind if name not in self.folds}
        return {name: first if first == second else f"{first}; {second}" for name, (first, second) in reasons.items()}

    def _in_order(self, norms: Iterable[Norm]) -> list[Norm]:
        first = {event.norm: event.index for event in reversed(self.flow.events)}
        return sorted(norms, key=lambda norm: first.get(norm.name, len(self.flow.events)))

    def _attempt(self, norm: Norm, after: bool) -> str:
        """Fold a norm, or say why not."""
        try:
            self.folds[norm.name] = self._fold(norm, after)
        except Obstacle as obstacle:
            return str(obstacle)
        return ""

    def _fold(self, norm: Norm, after: bool) -> Fold:
        check_kind(norm)
        calls = self.flow.calls(norm.name)
        if not calls:
            raise Obstacle("it does not run on the example")
        for call in calls:
            _check_call(norm, call)
        meetings = [
            meeting for call in calls for meeting in (self._before(norm, call) if after else self._behind(norm, call))
        ]
        found = affine_map(norm, calls[0].inputs[0])
        if not after and not found.is_bare:
            raise Obstacle("an activation follows inside it")
        _check_padding(found, meetings)
        channels = _by_host(self.hosts, meetings)
        for host, own in channels.items():
            _check_shift(host, found, own, after)
        through = {event.norm for meeting in meetings for event in meeting.events if event.norm is not None}
        meant = frozenset[str]().union(*(meeting.meant for meeting in meetings))
        return Fold(norm, found, channels, after, any(map(_reorders, calls)), frozenset(through), meant)

    def _before(self, norm: Norm, call: Event) -> list[Meeting]:
        """The products that a norm's input comes from."""
        ends = {event.index: p for p in self._products() if (event := self.flow.maker(p.output)) is not None}
        events = way_back(self.flow, call.inputs[0], ends, self._passable(after=True))
        products = [ends[event.index] for event in events if event.index in ends]
        between = [event for event in events if event.index not in ends]
        tensors = [p.output for p in products] + [t for event in between for t in event.outputs]
        inside = {event.index for event in (*events, call)}.union(*(p.events for p in products))
        aside = ways_aside(self.flow, tensors, inside)
        if {memory_of(t) for t in call.inputs[1:]} & {memory_of(t) for t in tensors}:
            raise Obstacle("its input is also its residual")
        starts = [(product.output, product.dim) for product in products]
        dim = channel_dim(norm, call.inputs[0])
        counts = [tensor.shape[d] for tensor, d in starts]
        (labels,) = Route(between, starts, [call.inputs[0]]).channels()
        _check_others(between, starts, labels, aside)
        of_each = _channels_reached(labels, dim, sum(counts)).split(counts)
        meant = self._given_by(tensors)
        return [
            Meeting(product, channels, torch.zeros_like(channels, dtype=torch.bool), between, meant)
            for product, channels in zip(products, of_each, strict=True)
        ]

    def _behind(self, norm: Norm, call: Event) -> list[Meeting]:
        """The products that a norm's output goes to."""
        if call.kwargs.get("residual") is not None:
            raise Obstacle("a residual is added inside it")
        ends = {p.call.index: p for p in self._products()}
        events = way_on(self.flow, call, ends, self._passable(after=False))
        products = [ends[event.index] for event in events if event.index in ends]
        if not products:
            raise Obstacle("its output goes to no layer")
        between = [event for event in events if event.index not in ends]
        tensors = call.outputs + [t for event in between for t in event.outputs]
        stay_inside(self.flow, tensors, {event.index for event in (*events, call)})
        _check_unwritten(self.flow, call, products)
        start = (call.outputs[0], channel_dim(norm, call.outputs[0]))
        labels = Route(between, [start], [product.input for product in products]).channels()
        meant = self._given_by(tensors)
        return [
            Meeting(product, *_channels_received(own, product.dim), between, meant)
            for product, own in zip(products, labels, strict=True)
        ]

    def _products(self) -> list[Product]:
        return [product for host in self.hosts for product in host.products]

    def _passable(self, after: bool) -> set[str]:
        """Norms that are folded already, and are as good as not there."""
        return {name for name, fold in self.folds.items() if fold.after == after and fold.map.is_bare}

    def _given_by(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*(self.flow.given_by.get(memory_of(tensor), ()) for tensor in tensors))


def _check_call(norm: Norm, call: Event) -> None:
    """Refuse a call that a layer without the norm's affine map could not take in its place."""
    if len(call.outputs) != 1 or not call.inputs:
        raise Obstacle("it does not give one tensor for one")
    if len(call.inputs) > 1 and not isinstance(norm.layer, NormLayer):
        raise Obstacle("it is called with more than its input")
    x, y = call.inputs[0], call.outputs[0]
    if x.shape != y.shape or x.dtype != y.dtype:
        raise Obstacle(f"it makes {y.dtype} of shape {tuple(y.shape)} of {x.dtype} of shape {tuple(x.shape)}")
    if memory_of(x) == memory_of(y):
        raise Obstacle("it works in place")


def _reorders(call: Event) -> bool:
    """Whether a norm gives a tensor in the order of its dimensions for one that is not."""
    return call.outputs[0].is_contiguous() and not call.inputs[0].is_contiguous()


def _channels_reached(labels: Tensor, dim: int, count: int) -> Tensor:
    """For each of `count` channels the norm's, at `dim`, that all of its values reach; NOTHING if none does."""
    if (labels == NOTHING).any():
        raise Obstacle("zeros are padded in between")
    shape = [1 if d != dim else -1 for d in range(labels.dim())]
    own = torch.arange(labels.shape[dim], device=labels.device).reshape(shape).expand(labels.shape).flatten()
    none = torch.full((count,), NOTHING, device=labels.device)
    highest = none.scatter_reduce(0, labels.flatten(), own, "amax", include_self=False)
    lowest = none.scatter_reduce(0, labels.flatten(), own, "amin", include_self=False)
    if not torch.equal(lowest, highest):
        raise Obstacle("one channel of the layer before it is several of its own")
    return highest


def _channels_received(labels: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """For each channel at `dim` the one of a norm that its values come from, and whether there are zeros among them."""
    rows = labels.movedim(dim, 0).flatten(1)
    highest, nothing = rows.amax(1), rows == NOTHING
    if not (nothing | (rows == highest[:, None])).all():
        raise Obstacle("one channel of the layer after it is several of its own")
    return highest, nothing.any(1) & (highest != NOTHING)


def _check_others(between: list[Event], starts: list[tuple[Tensor, int]], labels: Tensor, aside: Aside) -> None:
    """Refuse others who read a channel that the norm reads; they may have the rest, as after a split."""
    memories = {memory_of(tensor) for tensor in aside.tensors}
    known = {id(tensor) for tensor in aside.tensors}
    events = sorted([*between, *aside.events], key=lambda event: event.index)
    for reader in aside.readers:
        read = [tensor for tensor in reader.inputs if memory_of(tensor) in memories]
        if not all(id(tensor) in known for tensor in read):
            raise used_by(reader)
        try:
            theirs = Route(events, starts, read).channels()
        except Obstacle:
            raise used_by(reader) from None
        if any(torch.isin(own, labels).any() for own in theirs):
            raise used_by(reader)


def _check_unwritten(flow: Flow, call: Event, products: list[Product]) -> None:
    """Refuse a norm whose input is written over before the layers after it read what will be that input itself."""
    last = max(product.call.index for product in products)
    for event in flow.readers(call.inputs[0]):
        if call.index < event.index < last and memory_of(call.inputs[0]) in map(memory_of, event.written):
            raise Obstacle(f"its input is changed by {event} before the layer after it runs")


def _by_host(hosts: list[Host], meetings: list[Meeting]) -> dict[Host, Tensor]:
    """The channels of each host, if all of its products agree about them."""
    found: dict[Host, Tensor] = {}
    seen = {meeting.product for meeting in meetings}
    for host in hosts:
        own = [meeting for meeting in meetings if meeting.product in host.products]
        if not own:
            continue
        if host.obstacle is not None:
            raise Obstacle(host.obstacle)
        if not seen.issuperset(host.products) or any(not torch.equal(s.channels, own[0].channels) for s in own):
            raise Obstacle(f"{host.name} runs more than once, and not always with it")
        found[host] = own[0].channels
    return found


def per_channel(values: Tensor, channels: Tensor, otherwise: float, device: torch.device) -> Tensor:
    """The values of a norm's channels, for the channels of a layer."""
    found = values[channels.clamp(min=0)]
    return torch.where(channels == NOTHING, otherwise, found).to(device)


def _check_padding(found: AffineMap, meetings: list[Meeting]) -> None:
    """Refuse a shift of channels that zeros are padded to, which the norm does not shift."""
    for meeting in meetings:
        if found.shift[meeting.channels[meeting.is_padded]].any():
            raise Obstacle("zeros that are padded after it would get its shift too")


def _check_shift(host: Host, found: AffineMap, channels: Tensor, after: bool) -> None:
    """Refuse a shift that is not the same everywhere after the layer, or that the layer has no bias for."""
    weight = host.weight.detach().double()
    shift = per_channel(found.shift, channels, 0.0, weight.device)
    if not after and shift.any():
        shift = host.products[0].constant_output(weight, shift)
    if shift.any() and not host.takes_bias:
        raise Obstacle(f"{host.name} has no bias, and no place for one")
