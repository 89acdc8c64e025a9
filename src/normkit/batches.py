"""Running a model on a batch: which part of it is the input, on which device, and which tensors it holds."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.named_layers import named_layers

Forward = Callable[[nn.Module, Any], Any]


def feed(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run a model on a batch, moved to where the model is, and return its output.

    A tensor is the input. Of a tuple or list the first elements are the inputs, as many as the model's forward has
    required arguments, and the rest are targets. The items of a mapping are keyword arguments. `forward(model, batch)`
    replaces these rules.
    """
    batch = moved(batch, device_of(model))
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*_inputs_in(batch, model))
    return model(batch)


def _inputs_in(batch: list[Any] | tuple[Any, ...], model: nn.Module) -> list[Any] | tuple[Any, ...]:
    names = required_arguments(model)
    if len(batch) < max(1, len(names)):
        raise ArgumentError(
            f"a batch must be a tensor, a dictionary, or begin with what the model's forward requires "
            f"({', '.join(names) or 'an input'}); got a {type(batch).__name__} of {len(batch)}. "
            "forward=lambda model, batch: ... replaces that."
        )
    return batch[: max(1, len(names))]


def target_in(model: nn.Module, batch: Any) -> Any:
    """What a loss compares the output with: what follows the inputs of a tuple or list, one element alone or a tuple.

    Of any other batch, and of a tuple of inputs alone, it is the whole batch.
    """
    if not isinstance(batch, list | tuple):
        return batch
    rest = tuple(batch[max(1, len(required_arguments(model))) :])
    return batch if not rest else rest[0] if len(rest) == 1 else rest


def required_arguments(model: nn.Module) -> list[str]:
    """The names of what a model's forward must be given, in order; a forward of any arguments requires none."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module  # their own forwards take anything
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled forward may have no signature
        return []
    return [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


def each_batch(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the batches once; raise if there are none."""
    first = iter(_iterable(batches))
    try:
        batch = next(first)
    except StopIteration:
        raise ArgumentError(
            "there are no batches. A generator can be iterated over only once: pass a list or a DataLoader."
        ) from None
    return chain([batch], first)


def repeatable(batches: Iterable[Any], why: str) -> Iterable[Any]:
    """The batches, if they can be iterated over more than once; an error that names `why` they must be otherwise."""
    if iter(_iterable(batches)) is batches:
        raise ArgumentError(
            f"{why} iterates over the batches more than once; pass a list or a DataLoader, not an iterator."
        )
    return batches


def _iterable(batches: Iterable[Any]) -> Iterable[Any]:
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise ArgumentError(f"batches must be an iterable of batches; got a {type(batches).__name__}. Pass [batch].")
    return batches


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a model's parameters, or else of its buffers; None if it has neither."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return None if tensor is None else tensor.device


def moved(value: Any, device: torch.device | None) -> Any:
    """A batch with every tensor on the device."""
    if device is None:
        return value
    return map_leaves(value, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of any nesting of tuples, lists, sets, mappings and dataclasses, in their order."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)]


def leaves_in(value: Any) -> Iterator[Any]:
    """Everything in a nesting of tuples, lists, sets, mappings and dataclasses that is none of these itself."""
    parts = _parts(value)
    if parts is None:
        yield value
    else:
        for part in parts:
            yield from leaves_in(part)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a nesting with `function` applied to each of its leaves. Mappings become dictionaries."""
    parts = _parts(value)
    return function(value) if parts is None else _rebuilt(value, [map_leaves(part, function) for part in parts])


def _parts(value: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return None


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """A container like `value` that holds other parts."""
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*parts)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(parts)
    twin = copy.copy(value)  # not dataclasses.replace, which refuses fields with init=False
    for field, part in zip(fields(value), parts, strict=True):
        object.__setattr__(twin, field.name, part)  # also where the dataclass is frozen
    return twin


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every layer, without gradients; each gets its own mode back."""
    modes = [(module, module.training) for _, module in named_layers(model)]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
