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
