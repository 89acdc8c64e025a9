"""How a model is run on a batch: what of it is the input, where it must be, and what comes out."""

from __future__ import annotations

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

    A tensor is the input; of a tuple or list the first element is, and the rest are targets; a dictionary's items are
    keyword arguments. `forward(model, batch)` replaces that.
    """
    batch = moved(batch, device_of(model))
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        if not batch:
            raise ArgumentError("a batch is an empty tuple; needed is a tensor, (input, target, ...) or a dictionary.")
        return model(batch[0])
    return model(batch)


def each_batch(batches: Iterable[Any]) -> Iterator[Any]:
    """Go through the batches once; that there is none is an error."""
    first = iter(_iterable(batches))
    try:
        batch = next(first)
    except StopIteration:
        raise ArgumentError(
            "there are no batches. A generator can be gone through only once: pass a list or a DataLoader."
        ) from None
    return chain([batch], first)


def repeatable(batches: Iterable[Any], why: str) -> Iterable[Any]:
    """The batches, if they can be gone through more than once."""
    if iter(_iterable(batches)) is batches:
        raise ArgumentError(
            f"{why} goes through the batches more than once; pass a list or a DataLoader, not an iterator."
        )
    return batches


def _iterable(batches: Iterable[Any]) -> Iterable[Any]:
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise ArgumentError(f"batches must be an iterable of batches; got a {type(batches).__name__}. Pass [batch].")
    return batches


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model's parameters are, or else its buffers; None if it has neither."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return None if tensor is None else tensor.device


def moved(value: Any, device: torch.device | None) -> Any:
    """The same, with every tensor on the device."""
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of any nesting of tuples, lists, dictionaries and dataclasses, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, list | tuple | set):
        return [tensor for item in value for tensor in tensors_in(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in fields(value) for tensor in tensors_in(getattr(value, field.name))]
    return []


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
