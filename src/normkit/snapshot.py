"""Everything a model is, kept so that it can be put back bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.named_layers import named_layers


class _Container(NamedTuple):
    """A dictionary, list or set, and what was in it. Handles of hooks know the object itself: it is refilled."""

    itself: Any
    content: Any

    def refill(self) -> None:
        self.itself.clear()
        fill = self.itself.extend if isinstance(self.itself, list) else self.itself.update
        fill(self.content)


class _Value(NamedTuple):
    """A tensor, what it held, whether it wants a gradient, and the one it had."""

    tensor: Tensor
    held: Tensor
    requires_grad: bool
    grad: _Value | None

    def put_back(self) -> Tensor:
        tensor, held = self.tensor, self.held
        if (tensor.shape, tensor.dtype, tensor.device) != (held.shape, held.dtype, held.device):
            tensor.data = held.clone()
        elif not _same_bits(tensor, held):  # an untouched one is left alone: autograd counts what is written
            with torch.no_grad():
                tensor.copy_(held)
        if tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
            tensor.grad = None if self.grad is None else self.grad.put_back()
        return tensor


class Snapshot:
    """A model's layers, tensors, modes, hooks and attributes, to be put back.

    Objects stay the same: an optimizer's parameters and the handles of hooks are still the model's afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): module for _, module in named_layers(model)}.values()
        self._modules = [(module, type(module), dict(vars(module))) for module in modules]
        attributes = [value for _, _, state in self._modules for value in state.values()]
        self._containers = [
            _Container(value, value.copy()) for value in attributes if isinstance(value, dict | list | set)
        ]
        inside = [item for of in self._containers if isinstance(of.itself, dict) for item in of.content.values()]
        tensors = {id(value): value for value in (*attributes, *inside) if _has_values(value)}
        self._values = [_kept(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Put everything back."""
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
    """Leave the model and all random states as they are, whatever is done inside, and however it ends."""
    snapshot = Snapshot(model)
    with same_random_state():
        try:
            yield
        finally:
            snapshot.restore()


@contextmanager
def same_random_state() -> Iterator[None]:
    """Put the random states of torch, numpy and Python back where they were."""
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


def _has_values(value: object) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta


def _kept(tensor: Tensor) -> _Value:
    grad = tensor.grad if tensor.is_leaf else None
    return _Value(tensor, tensor.detach().clone(), tensor.requires_grad, None if grad is None else _kept(grad))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether nothing was written; a NaN is the same as itself."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
