"""Calls into the watched model, and what was written in each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _current_graph_task_id

from normkit.batches import tensors_in
from normkit.doctor.call_site import CallSite
from normkit.moments import Moments

Use = Literal["step", "other step", "discarded", "no backward", "no grad", "untracked", "recompute", "repeated",
              "estimate", "failed", "unseen"]  # fmt: skip
"""What became of the forward that wrote:

step            its gradient went into a step of the watched optimizer
other step      its gradient went into a step of another optimizer, as a discriminator's does while the generator learns
discarded       its gradient was thrown away before a step, as an attack's is
no backward     it had a graph for a backward, and there was none
no grad         it ran under no_grad
untracked       nothing before the layer requires a gradient: a frozen backbone
recompute       activation checkpointing repeated it inside the backward
repeated        its gradient was thrown away, and its batch came again before the step
estimate        statistics were being estimated anew by torch's update_bn, or normkit was measuring something
failed          it raised
unseen          the write was in no forward that could be seen: compiled code, or an assignment
"""


@dataclass(eq=False, slots=True)
class Pass:
    """One call from outside into the model or a part of it.

    Attributes:
        number: how many passes there were before it.
        step: how many steps there were before it.
        has_grad: whether gradients were enabled.
        is_recompute: whether it runs inside a backward.
        given: the tensors that it was given, with their versions: by these another pass has the same batch, or not.
        batch_size: that of the first.
        repeats: an earlier pass of this step with the same batch.
        is_repeated: whether there was a later one.
        site: the line that called it; known when something has been written.
        visited: the layers with statistics that ran.
    """

    number: int
    step: int
    has_grad: bool
    is_recompute: bool
    given: tuple[tuple[weakref.ref[Tensor], int], ...] = ()
    batch_size: int | None = None
    repeats: Pass | None = None
    is_repeated: bool = False
    site: CallSite | None = None
    has_failed: bool = False
    visited: set[str] = field(default_factory=set)

    def take(self, given: Sequence[Tensor]) -> None:
        """Note what the pass was given."""
        self.given = tuple((weakref.ref(tensor), _version(tensor)) for tensor in given)
        self.batch_size = given[0].shape[0] if given and given[0].dim() else None

    def has_batch_of(self, other: Pass) -> bool:
        """Whether the two were given the very same tensors, unchanged in between."""
        return len(self.given) == len(other.given) > 0 and all(
            mine() is not None and mine() is theirs() and version == then
            for (mine, version), (theirs, then) in zip(self.given, other.given, strict=True)
        )

    def nonfinite_inputs(self) -> int:
        """How many values that it was given are NaN or infinite."""
        alive = [tensor for tensor in (given() for given, _ in self.given) if tensor is not None]
        return sum(int((~tensor.isfinite()).sum()) for tensor in alive if tensor.is_floating_point())


class Window:
    """The backward passes whose gradients a parameter holds: a step uses these, and no others."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self.tasks: set[int] = set()
        self.remove = parameter.register_hook(self._arrives).remove

    def _arrives(self, gradient: Tensor) -> None:
        held = self._parameter.grad  # what was there before this gradient is added
        if held is None or (type(held) is Tensor and held.layout is torch.strided and not held.any()):
            self.tasks.clear()
        self.tasks.add(_current_graph_task_id())


@dataclass(eq=False, slots=True)
class Write:
    """One forward that wrote one layer's statistics.

    Attributes:
        of: the pass that the forward was in.
        is_training: the layer's mode.
        has_grad: whether gradients were enabled.
        is_frozen: whether none of the layer's parameters required a gradient.
        is_estimate: whether the layer was averaging over batches while it does not otherwise, or normkit called it.
        window: the gradients of a parameter that tells what a step used; None if there is no such parameter.
        batch: the moments of the batch, of some channels.
        is_again: whether the layer has written before in this pass.
        needs_gradient: whether a backward could reach the forward.
        tasks: the backward passes that did.
        is_used_elsewhere: whether another optimizer has made a step with its gradient.
    """

    of: Pass
    is_training: bool
    has_grad: bool
    is_frozen: bool
    is_estimate: bool
    window: Window | None
    batch: Moments | None
    is_again: bool = False
    needs_gradient: bool = False
    tasks: set[int] = field(default_factory=set)
    is_used_elsewhere: bool = False

    def follow(self, output: Any) -> None:
        """Take note when a backward reaches what the forward gave."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self.needs_gradient = True
                tensor.register_hook(self._arrives)

    def _arrives(self, gradient: Tensor) -> None:
        self.tasks.add(_current_graph_task_id())

    def use(self) -> Use | None:
        """What became of it, as far as that is known when a step ends; None if it may yet change."""
        if self.of.is_recompute:
            return "recompute"
        if self.is_estimate:
            return "estimate"
        if self.tasks and (self.window is None or self.tasks & self.window.tasks):
            return "step"
        if self.is_used_elsewhere:
            return "other step"
        if self.of.has_failed:
            return "failed"
        if not self.has_grad and not self.tasks:
            return "no grad"
        return None if self.needs_gradient else "untracked"

    def last_use(self) -> Use:
        """What became of it, when nothing more is to come."""
        thrown_away: Use = "repeated" if self.of.is_repeated else "discarded"
        return self.use() or (thrown_away if self.tasks else "no backward")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
