"""How norms are wired to what is before them, read from the operators that one forward called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor, nn

from normkit.surgery.fold.dataflow import Event, Flow, memory_of
from normkit.surgery.fold.hosts import Product, hosts
from normkit.surgery.fold.operators import PADS, PRODUCTS
from normkit.surgery.fold.routes import Route, branches
from normkit.surgery.operation import Skip

_NOISE = frozenset({"bernoulli", "bernoulli_", "dropout", "feature_dropout", "native_dropout"})


def is_functional_norm(event: Event) -> bool:
    """Whether an operator that no norm layer called normalizes across a batch."""
    return event.norm is None and "batch_norm" in event.operator and "backward" not in event.operator


def uses_batch_statistics(event: Event) -> bool:
    """Whether a functional norm takes the statistics of its input."""
    if event.operator.endswith(("_no_training", "_no_update")):
        return False
    given = dict(zip((a.name for a in event.func._schema.arguments), event.args, strict=False)) | event.kwargs
    return bool(given.get("training", given.get("train", "_with_update" in event.operator)))


def owner_of(event: Event) -> str:
    """The name of a norm layer or, for a functional norm, of the layer that called it."""
    return event.where if event.norm is None else event.norm


def redundant_biases(model: nn.Module, flow: Flow, removes: Callable[[Event], int | None]) -> dict[str, str]:
    """The layers with a bias that goes to norms alone, each with the first of these norms.

    `removes` gives the dimension of a call's channels if it subtracts the mean of each of them. The bias must be one
    constant for all values that share a mean, whichever way they are rearranged in between.
    """
    found: dict[str, str] = {}
    for host in hosts(model, flow):
        if host.bias is None or any(event.index not in host.events for event in flow.readers(host.bias)):
            continue
        after = [_norm_after(flow, product, removes) for product in host.products]
        if after and all(name is not None for name in after):
            found[host.owner.name] = str(after[0])
    return found


def _norm_after(flow: Flow, product: Product, removes: Callable[[Event], int | None]) -> str | None:
    try:
        leaving = branches(flow, [product.output], product.events)
        if not leaving.readers or any(event.operator in PADS for event in leaving.events):
            return None
        is_removed = all(
            (dim := removes(event)) is not None and _is_constant_for(event, dim, product, leaving.events)
            for event in leaving.readers
        )
    except Skip:
        return None
    return owner_of(leaving.readers[0]) if is_removed else None


def _is_constant_for(call: Event, dim: int, product: Product, between: list[Event]) -> bool:
    """Whether each channel of a norm, in this dimension, holds values of one channel of the layer before it."""
    x, others = call.inputs[0], call.inputs[1:]
    known = {id(product.output), *(id(tensor) for event in between for tensor in event.outputs)}
    memories = {memory_of(product.output), *(memory_of(tensor) for event in between for tensor in event.outputs)}
    if id(x) not in known or any(memory_of(tensor) in memories for tensor in others):
        return False
    (labels,) = Route(between, [(product.output, product.dim)], [x]).channels()
    if labels.dim() < 2:
        return False
    rows = labels.movedim(dim, 0).flatten(1)
    return bool((rows.amax(1) == rows.amin(1)).all())


def dropout_before_norms(flow: Flow) -> dict[str, set[str]]:
    """By norm, the layers that drop values at random which reach it without another norm in between.

    A factor for a whole example, as stochastic depth has it, is no dropout.
    """
    found: dict[str, set[str]] = defaultdict(set)
    reached: dict[int, set[str]] = {}
    for event in flow.events:
        origins = set().union(*(reached.get(memory_of(tensor), set()) for tensor in event.inputs))
        if event.operator in _NOISE and _is_per_value(event):
            origins.add(event.where)
        if not origins:
            continue
        if event.norm is not None or is_functional_norm(event):
            found[owner_of(event)] |= origins
            continue
        for tensor in (*event.outputs, *event.written):
            reached.setdefault(memory_of(tensor), set()).update(origins)
    return dict(found)


def _is_per_value(event: Event) -> bool:
    noise: Tensor = event.outputs[0]
    return noise.dim() > 1 and noise.numel() > noise.shape[0]


def weights_before(model: nn.Module, flow: Flow) -> dict[str, list[nn.Parameter]]:
    """By norm, the weights of the layers that its input comes from, up to the next norms or products."""
    makers = {product.call.index: product for host in hosts(model, flow) for product in host.products}
    found: dict[str, list[nn.Parameter]] = defaultdict(list)
    for event in flow.events:
        if event.norm is not None:
            for index in _sources(flow, event):
                if index in makers:
                    found[event.norm].append(makers[index].weight)
    return dict(found)


def _sources(flow: Flow, call: Event) -> list[int]:
    """The events of products and norms that a call's input comes from."""
    seen: set[int] = set()
    ends: list[int] = []
    waiting = list(call.inputs[:1])
    while waiting:
        event = flow.maker(waiting.pop())
        if event is None or event.index in seen:
            continue
        seen.add(event.index)
        if event.norm is not None or event.operator in PRODUCTS:
            ends.append(event.index)
        else:
            waiting += event.inputs
    return ends
