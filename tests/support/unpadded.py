"""What the examples of a batch give without padding: each runs alone, and batch norms wait for all of them.

The batch norms are torch's, called once with the values of all examples joined along one dimension.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

DEADLINE = 60  # seconds


class _Joined(nn.Module):
    """A batch norm of several threads, each with one example."""

    def __init__(self, norm: _BatchNorm, meeting: threading.Barrier, number: threading.local) -> None:
        super().__init__()
        self.norm = norm
        self._meeting, self._number = meeting, number
        self._given: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:  # (1, C, ...)
        me = self._number.of_example
        self._given[me] = x
        if self._meeting.wait(DEADLINE) == 0:
            self._together()
        self._meeting.wait(DEADLINE)
        y = self._made[me]
        self._meeting.wait(DEADLINE)  # before the next values of a norm that is called again
        return y

    def _together(self) -> None:
        order = sorted(self._given)
        flat = [self._given[i].flatten(2) for i in order]
        joined = torch.cat(flat, 2)  # (1, C, all positions)
        shape = (*joined.shape, *[1] * (self._given[order[0]].dim() - 3))
        parts = self.norm(joined.reshape(shape)).flatten(2).split([one.shape[2] for one in flat], 2)
        self._made = {i: part.reshape(self._given[i].shape) for i, part in zip(order, parts, strict=True)}


def run_unpadded(model: nn.Module, examples: Sequence[Any], call: Callable[[nn.Module, Any], Tensor]) -> list[Tensor]:
    """Run a model of torch's norms on examples, each a batch of one; statistics and gradients are left in the model."""
    meeting, number = threading.Barrier(len(examples)), threading.local()
    twin = _with_joined_norms(model, meeting, number)
    outputs: dict[int, Tensor] = {}
    failures: list[BaseException] = []

    def run(i: int) -> None:
        number.of_example = i
        try:
            outputs[i] = call(twin, examples[i])
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(examples))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    if failures:
        raise failures[0]
    return [outputs[i] for i in range(len(examples))]


def _with_joined_norms(model: nn.Module, meeting: threading.Barrier, number: threading.local) -> nn.Module:
    """The model with its own parameters and buffers in other modules."""
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
                setattr(parent, name, _Joined(child, meeting, number))
    return twin


def assert_as_unpadded(
    model: nn.Module,
    x: Tensor,
    examples: Sequence[Tensor],
    padded: Callable[[nn.Module, Tensor], Tensor],
    *,
    twin: nn.Module | None = None,
    call: Callable[[nn.Module, Any], Tensor] = lambda model, one: model(one),
    rounding: float = 1e-10,
) -> None:
    """A padded batch gives what its examples give, in outputs, statistics and gradients.

    Args:
        model: what `padded` is called with.
        x: the batch, with something that is not zero in its padding.
        examples: each as a batch of one. What they give are the first positions of what the batch gives.
        padded: calls a model with the batch.
        twin: the same model with the norms of torch, if these are others.
        call: calls a model with an example.
        rounding: how far results may be apart, relative to the largest.
    """
    twin = copy.deepcopy(model) if twin is None else twin
    expected = run_unpadded(twin, examples, call)
    pairs = zip(padded(model, x).split(1), expected, strict=True)
    found = [one[tuple(slice(size) for size in other.shape)] for one, other in pairs]
    _assert_near(found, expected, rounding, "outputs")
    _assert_near(list(model.buffers()), list(twin.buffers()), rounding, "statistics")
    weights = [torch.randn_like(one) for one in expected]
    for some in (found, expected):
        torch.stack([(one * weight).sum() for one, weight in zip(some, weights, strict=True)]).sum().backward()
    grads = [[p.grad for p in one.parameters() if p.grad is not None] for one in (model, twin)]
    _assert_near(*grads, rounding, "gradients")


def _assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], rounding: float, what: str) -> None:
    size = max((one.abs().max().item() for one in expected if one.is_floating_point()), default=0.0)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, what
        furthest = (one.double() - other.double()).abs().max().item()
        assert furthest <= rounding * size, f"{what} differ by {furthest:.1e} of {size:.1e}"
