"""Which norms can be folded into which layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normkit.layers.norm_layer import NormLayer
from normkit.surgery.fold.affine_map import AffineMap, affine_map, channel_dim, must_be_affine
from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.gamma import Holders, holders, moved_affine, must_own_its_affine
from normkit.surgery.fold.hosts import Host, Product
from normkit.surgery.fold.routes import (
    NOTHING,
    Branches,
    Route,
    branches,
    events_back,
    events_on,
    must_stay_inside,
    used_by,
)
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Skip

Side = Literal["before", "after"]


@dataclass(eq=False)
class Fold:
    """A norm, and the layers it is folded into.

    Attributes:
        channels: for each host, the norm's channel for each of its output channels if it is before the norm, or for
            each of its input channels if it is after it; NOTHING where there is none.
        hosts_are: on which side of the norm its hosts are.
        dense: whether the norm returned contiguous tensors for others.
        through: the norms between, which are themselves folded.
        meant: the layers whose outputs are meant to change.
        keeps_norm: whether the norm keeps normalizing, and gives only its gamma and beta away.
    """

    norm: Norm
    map: AffineMap
    channels: dict[Host, Tensor]
    hosts_are: Side
    dense: bool
    through: frozenset[str]
    meant: frozenset[str]
    keeps_norm: bool = False

    @property
    def leaves_nothing(self) -> bool:
        """Whether nothing remains in the place of the norm."""
        return self.map.is_bare and not self.keeps_norm

    @property
    def where(self) -> str:
        """The hosts' names."""
        return " and ".join(host.name for host in self.channels)


class Coupling(NamedTuple):
    """A product at one end of a route from or to one call of a norm, and how its channels correspond to the norm's."""

    product: Product
    channels: Tensor
    is_padded: Tensor
    events: list[Event]
    meant: frozenset[str]


@dataclass
class FoldPlan:
    """What is to be folded, found before anything is changed.

    Attributes:
        flow: what the model does on the example.
        hosts: the layers that norms can be folded into.
        folds: by norm, what is to be folded.
        reasons: why the other norms are not.
        holders: the norms that have parameters in a memory.
    """

    flow: Flow
    hosts: list[Host]
    folds: dict[str, Fold] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    holders: Holders = field(default_factory=dict)

    def find(self, norms: Sequence[Norm]) -> None:
        """Find hosts for every norm: before it, or else after it."""
        in_order, self.holders = self._in_order(norms), holders(norms)
        not_before = {norm.name: self._attempt(norm, "before") for norm in in_order}
        left = [norm for norm in reversed(in_order) if norm.name not in self.folds]
        not_after = {norm.name: self._attempt(norm, "after") for norm in left}
        for norm in left:
            if norm.name not in self.folds:
                reasons = dict.fromkeys([not_before[norm.name], not_after[norm.name]])
                self.reasons[norm.name] = "; ".join(reasons)

    def _in_order(self, norms: Iterable[Norm]) -> list[Norm]:
        first = {event.norm: event.index for event in reversed(self.flow.events)}
        return sorted(norms, key=lambda norm: first.get(norm.name, len(self.flow.events)))

    def _attempt(self, norm: Norm, side: Side) -> str:
        """Plan to fold a norm into hosts on one side of it, or return why that is not possible."""
        keeps_norm = side == "after" and norm.spec.moves_affine
        try:
            self.folds[norm.name] = self._fold(norm, side, keeps_norm)
        except Skip as reason:
            return f"its gamma and beta stay: {reason}" if keeps_norm else str(reason)
        return ""

    def _fold(self, norm: Norm, side: Side, keeps_norm: bool) -> Fold:
        calls = self._calls(norm, keeps_norm)
        moved = moved_affine(norm) if keeps_norm else None
        couple = self._couple_before if side == "before" else self._couple_after
        couplings = [coupling for call in calls for coupling in couple(norm, call)]
        found = moved or affine_map(norm, calls[0].inputs[0])
        if side == "after" and not found.is_bare:
            raise Skip("an activation follows inside it")
        _must_not_shift_padding(found, couplings)
        channels = _by_host(self.hosts, couplings)
        for host, own in channels.items():
            _must_take_shift(host, found, own, side)
        through = {event.norm for coupling in couplings for event in coupling.events if event.norm is not None}
        meant = frozenset[str]().union(*(coupling.meant for coupling in couplings))
        return Fold(norm, found, channels, side, any(map(_reorders, calls)), frozenset(through), meant, keeps_norm)

    def _calls(self, norm: Norm, keeps_norm: bool) -> list[Event]:
        """The calls of a norm that makes one tensor of one; skip if it cannot be folded whatever is around it."""
        if keeps_norm:
            must_own_its_affine(norm, self.holders, self.flow)
        else:
            must_be_affine(norm)
        calls = self.flow.calls(norm.name)
        if not calls:
            raise Skip("it does not run on the example")
        for call in calls:
            _must_map_one_tensor(norm, call)
        return calls

    def _couple_before(self, norm: Norm, call: Event) -> list[Coupling]:
        """The products that a norm's input comes from."""
        ends = {event.index: p for p in self._products() if (event := self.flow.maker(p.output)) is not None}
        events = events_back(self.flow, call.inputs[0], ends, self._passable("before"))
        products = [ends[event.index] for event in events if event.index in ends]
        between = [event for event in events if event.index not in ends]
        tensors = [p.output for p in products] + [t for event in between for t in event.outputs]
        inside = {event.index for event in (*events, call)}.union(*(p.events for p in products))
        leaving = branches(self.flow, tensors, inside)
        if {memory_of(t) for t in call.inputs[1:]} & {memory_of(t) for t in tensors}:
            raise Skip("its input is also its residual")
        starts = [(product.output, product.dim) for product in products]
        dim = channel_dim(norm, call.inputs[0])
        counts = [tensor.shape[d] for tensor, d in starts]
        (labels,) = Route(between, starts, [call.inputs[0]]).channels()
        _must_not_share_channels(between, starts, labels, leaving)
        of_each = _channels_reached(labels, dim, sum(counts)).split(counts)
        meant = self._given_by(tensors)
        return [
            Coupling(product, channels, torch.zeros_like(channels, dtype=torch.bool), between, meant)
            for product, channels in zip(products, of_each, strict=True)
        ]

    def _couple_after(self, norm: Norm, call: Event) -> list[Coupling]:
        """The products that a norm's output goes to."""
        if call.kwargs.get("residual") is not None:
            raise Skip("a residual is added inside it")
        ends = {p.call.index: p for p in self._products()}
        events = events_on(self.flow, call, ends, self._passable("after"))
        products = [ends[event.index] for event in events if event.index in ends]
        if not products:
            raise Skip("its output goes to no layer")
        between = [event for event in events if event.index not in ends]
        tensors = call.outputs + [t for event in between for t in event.outputs]
        must_stay_inside(self.flow, tensors, {event.index for event in (*events, call)})
        if not norm.spec.moves_affine:
            _must_be_unwritten(self.flow, call, products)
        start = (call.outputs[0], channel_dim(norm, call.outputs[0]))
        labels = Route(between, [start], [product.input for product in products]).channels()
        meant = self._given_by(tensors)
        return [
            Coupling(product, *_channels_received(own, product.dim), between, meant)
            for product, own in zip(products, labels, strict=True)
        ]

    def _products(self) -> list[Product]:
        return [product for host in self.hosts for product in host.products]

    def _passable(self, side: Side) -> set[str]:
        """Norms that are folded already, in the same direction, and leave nothing in their place."""
        return {name for name, fold in self.folds.items() if fold.hosts_are == side and fold.leaves_nothing}

    def _given_by(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*(self.flow.given_by.get(memory_of(tensor), ()) for tensor in tensors))


def _must_map_one_tensor(norm: Norm, call: Event) -> None:
    """Skip a call that does not make one new tensor of one tensor of the same shape and type."""
    if len(call.outputs) != 1 or not call.inputs:
        raise Skip("it does not return one tensor for one")
    if len(call.inputs) > 1 and not isinstance(norm.layer, NormLayer):
        raise Skip("it is called with more than its input")
    x, y = call.inputs[0], call.outputs[0]
    if x.shape != y.shape or x.dtype != y.dtype:
        raise Skip(f"it makes {y.dtype} of shape {tuple(y.shape)} of {x.dtype} of shape {tuple(x.shape)}")
    if memory_of(x) == memory_of(y):
        raise Skip("it works in place")


def _reorders(call: Event) -> bool:
    """Whether a norm returns a contiguous tensor for one that is not."""
    return call.outputs[0].is_contiguous() and not call.inputs[0].is_contiguous()


def _channels_reached(labels: Tensor, dim: int, count: int) -> Tensor:
    """For each of `count` channels, the norm's channel at `dim` that all of its values reach; NOTHING if none."""
    if (labels == NOTHING).any():
        raise Skip("zeros are padded in between")
    shape = [1 if d != dim else -1 for d in range(labels.dim())]
    own = torch.arange(labels.shape[dim], device=labels.device).reshape(shape).expand(labels.shape).flatten()
    none = torch.full((count,), NOTHING, device=labels.device)
    highest = none.scatter_reduce(0, labels.flatten(), own, "amax", include_self=False)
    lowest = none.scatter_reduce(0, labels.flatten(), own, "amin", include_self=False)
    if not torch.equal(lowest, highest):
        raise Skip("one channel of the layer before it is several of its own")
    return highest


def _channels_received(labels: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """For each channel at `dim`, the norm's channel that its values come from, and whether zeros are padded to it."""
    rows = labels.movedim(dim, 0).flatten(1)
    highest, nothing = rows.amax(1), rows == NOTHING
    if not (nothing | (rows == highest[:, None])).all():
        raise Skip("one channel of the layer after it is several of its own")
    return highest, nothing.any(1) & (highest != NOTHING)


def _must_not_share_channels(
    between: list[Event], starts: list[tuple[Tensor, int]], labels: Tensor, leaving: Branches
) -> None:
    """Skip if other operators read channels that the norm reads; they may read the rest, as after a split."""
    memories = {memory_of(tensor) for tensor in leaving.tensors}
    known = {id(tensor) for tensor in leaving.tensors}
    events = sorted([*between, *leaving.events], key=lambda event: event.index)
    for reader in leaving.readers:
        read = [tensor for tensor in reader.inputs if memory_of(tensor) in memories]
        if not all(id(tensor) in known for tensor in read):
            raise used_by(reader)
        try:
            theirs = Route(events, starts, read).channels()
        except Skip:
            raise used_by(reader) from None
        if any(torch.isin(own, labels).any() for own in theirs):
            raise used_by(reader)


def _must_be_unwritten(flow: Flow, call: Event, products: list[Product]) -> None:
    """Skip a norm whose input is overwritten before the layers after it run: once folded, they read that input."""
    last = max(product.call.index for product in products)
    for event in flow.readers(call.inputs[0]):
        if call.index < event.index < last and memory_of(call.inputs[0]) in map(memory_of, event.written):
            raise Skip(f"its input is changed by {event} before the layer after it runs")


def _by_host(hosts: list[Host], couplings: list[Coupling]) -> dict[Host, Tensor]:
    """The channels of each host; skip if its products do not agree about them."""
    found: dict[Host, Tensor] = {}
    seen = {coupling.product for coupling in couplings}
    for host in hosts:
        own = [coupling for coupling in couplings if coupling.product in host.products]
        if not own:
            continue
        if host.obstacle is not None:
            raise Skip(host.obstacle)
        if not seen.issuperset(host.products) or any(not torch.equal(c.channels, own[0].channels) for c in own):
            raise Skip(f"{host.name} runs more than once, and not always with it")
        found[host] = own[0].channels
    return found


def per_channel(values: Tensor, channels: Tensor, otherwise: float, device: torch.device) -> Tensor:
    """Values per channel of a norm, rearranged for the channels of a layer."""
    found = values[channels.clamp(min=0)]
    return torch.where(channels == NOTHING, otherwise, found).to(device)


def _must_not_shift_padding(found: AffineMap, couplings: list[Coupling]) -> None:
    """Skip a shift of channels that are padded with zeros after the norm, and so not shifted by it."""
    for coupling in couplings:
        if found.shift[coupling.channels[coupling.is_padded]].any():
            raise Skip("zeros that are padded after it would get its shift too")


def _must_take_shift(host: Host, found: AffineMap, channels: Tensor, side: Side) -> None:
    """Skip a shift that would not be constant in the layer's output, or that the layer has no bias for."""
    weight = host.weight.detach().double()
    shift = per_channel(found.shift, channels, 0.0, weight.device)
    if side == "after" and shift.any():
        shift = host.products[0].constant_output(weight, shift)
    if shift.any() and not host.takes_bias:
        raise Skip(f"{host.name} has no bias, and no place for one")
