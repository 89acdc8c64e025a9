"""The layers that norms can be folded into: those whose operator multiplies its input by a parameter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.named_layers import display_name, named_layers
from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.operators import COPIES, VIEWS
from normkit.surgery.operation import Skip


@dataclass(eq=False)
class Product:
    """One convolution or matrix product with a parameter.

    Attributes:
        events: the operator, and those that lead from the parameters to it.
        dim: the channel dimension of input and output.
        views: the events that lead from the parameter to the operator's weight.
    """

    call: Event
    input: Tensor
    output: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    dim: int
    views: list[Event]
    events: set[int]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Stride, padding, dilation, whether transposed, output padding and groups; nothing for a matrix product."""
        return tuple(self.call.args[3:]) if self.call.operator == "convolution" else ()

    @property
    def groups(self) -> int:
        """The number of groups of channels."""
        return int(self.geometry[5]) if self.geometry else 1

    def operand(self, weight: Tensor) -> Tensor:
        """What the operator would get if another tensor were in the parameter's place: a view of that tensor."""
        for event in self.views:
            if event.operator not in COPIES:
                view: Tensor = event.func(weight, *event.args[1:], **event.kwargs)
                weight = view
        return weight

    def by_channels(self, weight: Tensor) -> Tensor:
        """A view of the weight as (groups, outputs of a group, inputs of a group, ...)."""
        operand = self.operand(weight)
        if not self.geometry:
            return (operand[0] if operand.dim() == 3 else operand).t().unsqueeze(0)
        grouped: Tensor = operand.unflatten(0, (self.groups, -1))
        return grouped.transpose(1, 2) if self.geometry[3] else grouped

    def constant_output(self, weight: Tensor, constant: Tensor) -> Tensor:
        """The output per channel, without the bias, for an input that is constant in each of its channels.

        Computed on a map that is large enough to have a middle, whatever the example's size; skips a convolution whose
        output is not the same at the borders.
        """
        if not self.geometry:
            return (self.by_channels(weight)[0] * constant).sum(1)
        operand = self.operand(weight)
        stride, padding, dilation, _, _, _ = self.geometry
        kernel = operand.shape[2:]
        sides = [2 * (d * (k - 1) + 1 + s + p) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)]
        map_ = constant.reshape(1, -1, *[1] * len(sides)).expand(1, -1, *sides).contiguous()
        out: Tensor = torch.ops.aten.convolution.default(map_, operand, None, *self.geometry).flatten(2)[0]
        scale = torch.ops.aten.convolution.default(map_.abs(), operand.abs(), None, *self.geometry).max()
        if (out.amax(1) - out.amin(1)).max() > 1e-12 * scale:
            raise Skip("zeros at the borders would get its shift too")
        return out[:, out.shape[1] // 2]


class Owner(NamedTuple):
    """A layer that has a parameter, and under which name."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter


@dataclass(eq=False)
class Host:
    """A layer that norms can be folded into, and every product that its parameters are in."""

    owner: Owner
    products: list[Product] = field(default_factory=list)
    obstacle: str | None = None

    @property
    def name(self) -> str:
        """The layer's name in messages."""
        return display_name(self.owner.name)

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that its input is multiplied by."""
        return self.products[0].weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The parameter that is added, if any."""
        return self.products[0].bias

    @property
    def bias_now(self) -> Tensor | None:
        """Its bias after folding, which may have added one."""
        return self.bias if self.bias is not None else self.owner.module._parameters.get("bias")

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The types of its weight and of its outputs."""
        return {self.weight.dtype, *(product.output.dtype for product in self.products)}

    @property
    def events(self) -> set[int]:
        """All events of its products."""
        return set().union(*(product.events for product in self.products))

    @property
    def takes_bias(self) -> bool:
        """Whether it has a bias, or an empty place for one."""
        own = self.owner.module._parameters
        return self.bias is not None or (self.owner.attribute == "weight" and "bias" in own and own["bias"] is None)


def hosts(model: nn.Module, flow: Flow) -> list[Host]:
    """The layers whose parameters multiply something."""
    owners = _owners(model)
    found: dict[int, Host] = {}
    for product in _products(flow, owners):
        host = found.setdefault(id(product.weight), Host(owners[id(product.weight)][0]))
        host.products.append(product)
    for host in found.values():
        host.obstacle = _obstacle(flow, host, owners)
    return list(found.values())


Owners = dict[int, list[Owner]]


def _owners(model: nn.Module) -> Owners:
    """For each parameter the layers that have it, and under which name."""
    owners: Owners = defaultdict(list)
    for name, module in named_layers(model):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(Owner(name, module, attribute, parameter))
    return owners


def _products(flow: Flow, owners: Owners) -> list[Product]:
    found = [product for event in flow.events if (product := _product(flow, event, owners)) is not None]
    for product in found:
        _find_added_bias(flow, product, owners)
    return found


def _product(flow: Flow, event: Event, owners: Owners) -> Product | None:
    if event.operator == "convolution":
        input, operand, bias = event.args[:3]
        dim = 1
    elif event.operator == "addmm" and not event.kwargs and len(event.args) == 3:
        bias, input, operand = event.args
        dim = -1
    elif event.operator in ("mm", "bmm"):
        (input, operand), bias, dim = event.args, None, -1
    else:
        return None
    views = _views_of_parameter(flow, operand, owners)
    of_bias = [] if bias is None else _views_of_parameter(flow, bias, owners)
    if views is None or of_bias is None or (event.operator == "bmm" and operand.stride(0) != 0 and len(operand) > 1):
        return None
    weight = views[0].args[0] if views else operand
    own_bias = of_bias[0].args[0] if of_bias else bias
    events = {event.index, *(view.index for view in (*views, *of_bias))}
    return Product(event, input, event.outputs[0], weight, own_bias, dim, views, events)


def _views_of_parameter(flow: Flow, tensor: Tensor, owners: Owners) -> list[Event] | None:
    """The events that lead from a parameter to this tensor; None if there is no such parameter."""
    views: list[Event] = []
    while id(tensor) not in owners:
        event = flow.maker(tensor)
        if event is None or event.operator not in VIEWS:
            return None
        views.insert(0, event)
        tensor = event.args[0]
    return views


def _find_added_bias(flow: Flow, product: Product, owners: Owners) -> None:
    """Find the bias of a linear layer on a non-contiguous tensor, which is added to a view of the product."""
    output, readers = product.output, flow.readers(product.output)
    if product.bias is not None or product.geometry or not readers:
        return
    *views, last = readers
    for view in views:
        if view.operator not in ("view", "_unsafe_view") or view.inputs[0] is not output:
            return
        output = view.outputs[0]
    if last.operator == "add" and not last.kwargs and last.inputs[0] is output and _is_bias(last, owners):
        product.bias, product.output = last.args[1], last.outputs[0]
        product.events.update(event.index for event in readers)


def _is_bias(event: Event, owners: Owners) -> bool:
    other, added = event.args
    return isinstance(added, nn.Parameter) and id(added) in owners and added.shape == other.shape[-1:]


def _obstacle(flow: Flow, host: Host, owners: Owners) -> str | None:
    """Why no norm can be folded into a layer; None if one can."""
    first = host.products[0]
    weight = first.weight
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"{host.name} has weights of {weight.dtype}"
    try:
        ways = {(id(p.bias), str(p.geometry), p.dim, p.by_channels(weight).shape) for p in host.products}
        direct = memory_of(first.by_channels(weight)) == memory_of(weight)
    except RuntimeError:  # a view that only a copy of the weight allows
        direct = False
    if not direct:
        return f"{host.name} rearranges its weight before it uses it"
    if len(ways) > 1:
        return f"{host.name} is used in more than one way"
    return _shared(flow, host, owners)


def _shared(flow: Flow, host: Host, owners: Owners) -> str | None:
    for parameter in (host.weight, host.bias):
        if parameter is None:
            continue
        holders = [same for same in owners.values() if overlap(same[0].parameter, parameter)]
        if sum(map(len, holders)) > 1:
            names = {owner.name for holder in holders for owner in holder} - {host.owner.name}
            return f"{host.name} shares its parameters with {' and '.join(sorted(names)) or 'itself'}"
        for event in flow.readers(parameter):
            if event.index not in host.events and any(overlap(tensor, parameter) for tensor in event.inputs):
                return f"a parameter of {host.name} is also used by {event}"
    return None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; several parameters may lie in one storage without doing so."""
    if memory_of(a) != memory_of(b):
        return False
    (first, last), (start, end) = _extent(a), _extent(b)
    return first <= end and start <= last


def _extent(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset()) * tensor.itemsize
    reach = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.itemsize - 1
