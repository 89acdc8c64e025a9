"""Evaluating a model's loss again, at other parameters, without leaving a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.snapshot import untouched

Closure = Callable[[], Tensor]


class Loss:
    """The loss of one batch as a function of the parameters: `closure` computes it, as often as it is asked for.

    All evaluations begin with the same random state, so that dropout drops the same units.
    """

    def __init__(self, model: nn.Module, closure: Closure, random_state: Tensor | None = None) -> None:
        self._model, self._closure = model, closure
        self.random_state = torch.get_rng_state() if random_state is None else random_state

    def and_gradient(self, parameters: Sequence[nn.Parameter]) -> tuple[float, list[Tensor]]:
        """The loss, and its gradient by these parameters."""
        with untouched(self._model), torch.enable_grad():
            torch.set_rng_state(self.random_state)
            loss = checked(self._closure())
            found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        return loss.item(), [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def checked(loss: object) -> Tensor:
    """A loss that can be differentiated; raise if it cannot."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ArgumentError(f"closure must return the loss, a tensor with one number; got {got}. Return its mean().")
    if not loss.requires_grad:
        raise ArgumentError(
            "closure must return a loss with a gradient; got one without. Compute it inside the closure."
        )
    return loss


@contextmanager
def at(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let parameters have other values inside the block. Their own memory is never written to."""
    own = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in own.items():
            parameter.data = value


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def length(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of several tensors taken together, in double precision."""
    # Without copies in double precision: a model's gradients are read once.
    return math.sqrt(sum(torch.linalg.vector_norm(t, dtype=torch.float64).item() ** 2 for t in tensors))


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Element by element, in double precision."""
    return [one.double() - other.double() for one, other in zip(a, b, strict=True)]
