"""The whole state of a model, kept so that it can be restored bit for bit."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.named_layers import named_layers

_REFILLED = (dict, list, set, deque)


class _Container(NamedTuple):
    """A dictionary, list, deque or set, and what was in it.

    It is refilled, not replaced: the handles of hooks refer to it. One that still holds the same is left alone, because
    those of torch.fx refuse every change.
    """

    itself: Any
    content: Any

    def refill(self) -> None:
        now, then = _items(self.itself), _items(self.content)
        if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
            return
        self.itself.clear()
        fill = self.itself.extend if isinstance(self.itself, list | deque) else self.itself.update
        fill(self.content)


class _Value(NamedTuple):
    """A tensor, the values it held, whether it requires a gradient, and the gradient it had."""

    tensor: Tensor
    held: Tensor
    requires_grad: bool
    grad: _Value | None

    def put_back(self) -> Tensor:
        tensor, held = self.tensor, self.held
        if (tensor.shape, tensor.dtype, tensor.device) != (held.shape, held.dtype, held.device):
            tensor.data = held.clone()
        elif not all_equal(tensor, held):  # an unchanged tensor is not written to: autograd counts every write
            with torch.no_grad():
                tensor.copy_(held)
        if tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
            tensor.grad = None if self.grad is None else self.grad.put_back()
        return tensor


class Snapshot:
    """A model's layers, tensors, modes, hooks and attributes, to be restored.

    Objects keep their identity: an optimizer's parameters and the handles of hooks still belong to the model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): module for _, module in named_layers(model)}.values()
        self._modules = [(module, type(module), dict(vars(module))) for module in modules]
        held = _held(value for _, _, state in self._modules for value in state.values())
        self._containers = [_Container(value, value.copy()) for value in held if isinstance(value, _REFILLED)]
        tensors = {id(value): value for value in held if _has_values(value)}
        self._values = [_kept(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Give the model the state it had."""
        for module, kind, state in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(state)
        for container in self._containers:
            container.refill()
        for value in self._values:
            value.put_back()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model and all random states at the end of the block, also after an error."""
    snapshot = Snapshot(model)
    with same_random_state():
        try:
            yield
        finally:
            snapshot.restore()


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python at the end of the block."""
    numpy = sys.modules.get("numpy")
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if of_cuda is not None:
            torch.cuda.set_rng_state_all(of_cuda)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _held(attributes: Iterable[Any]) -> list[Any]:
    """Everything that attributes hold, through any nesting of containers, each of these once."""
    found: list[Any] = list(attributes)
    seen: set[int] = set()
    for value in found:  # grows in the loop
        if isinstance(value, (*_REFILLED, tuple)) and id(value) not in seen:
            seen.add(id(value))
            found.extend(value.values() if isinstance(value, dict) else value)
    return list({id(value): value for value in found}.values())


def _has_values(value: object) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta


def _kept(tensor: Tensor) -> _Value:
    grad = tensor.grad if tensor.is_leaf else None
    return _Value(tensor, tensor.detach().clone(), tensor.requires_grad, None if grad is None else _kept(grad))


def equal_values(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal; a NaN equals a NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def all_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are equal everywhere; a NaN equals a NaN."""
    return torch.equal(a, b) or bool(equal_values(a, b).all())
