"""What a model does on an example: every operator that it calls, with its tensors, recorded in one eager run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.hooks import AfterForward, BeforeForward, hooked
from normkit.kernels import select
from normkit.named_layers import named_layers
from normkit.snapshot import untouched
from normkit.surgery.parity import run_example


class Event:
    """A call of an operator, or of a whole norm layer, whose operators are not recorded.

    Attributes:
        index: its place in the order of events.
        func: the operator; None for a norm layer.
        norm: the norm layer's name; None for an operator.
        where: name of the innermost layer that was running.
        outputs: the tensors it returned. They and the arguments are kept alive, so that no two tensors have one id.
    """

    def __init__(
        self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any, where: str, norm: str | None = None
    ) -> None:
        self.func, self.args, self.kwargs, self.where, self.norm = func, args, kwargs, where, norm
        self.outputs = tensors_in(outputs)
        self.inputs = tensors_in((args, kwargs))
        self.index = -1

    @property
    def operator(self) -> str:
        """The operator's name, without its overload and torch's own namespace: "relu"."""
        return "" if self.func is None else str(self.func._schema.name).removeprefix("aten::")

    @property
    def written(self) -> list[Tensor]:
        """The arguments that it changes in place."""
        if self.func is None or not self.func._schema.is_mutable:
            return []
        given = dict(zip((a.name for a in self.func._schema.arguments), self.args, strict=False)) | self.kwargs
        changed = [a.name for a in self.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return tensors_in([given.get(name) for name in changed])

    def __str__(self) -> str:
        what = self.operator if self.norm is None else self.norm
        return f"{what} in {self.where}" if self.where and self.norm is None else what


class Flow:
    """The events of one forward, and which of them make and read which tensors.

    Readers are found by memory: reading a view of an output, or its `.data`, is reading that output.

    Attributes:
        events: in their order.
        results: copies of the outputs of each call of a layer, for norms and layers that call operators themselves.
        outputs: copies of the model's outputs.
        given_by: the layers whose output is in a memory.
        given_out: the memories of the model's output.
        kept: memories of tensors that are attributes of layers after the run, and the layers' names.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.results: dict[str, list[list[Tensor]]] = defaultdict(list)
        self.outputs: list[Tensor] = []
        self.given_by: dict[int, set[str]] = defaultdict(set)
        self.given_out: set[int] = set()
        self.kept: dict[int, str] = {}
        self._makers: dict[int, Event] = {}
        self._readers: dict[int, list[Event]] = defaultdict(list)

    def add(self, event: Event) -> None:
        """Append the next event."""
        event.index = len(self.events)
        self.events.append(event)
        for memory in {memory_of(tensor) for tensor in event.inputs}:
            self._readers[memory].append(event)
        old = {id(tensor) for tensor in event.inputs}
        for tensor in event.outputs:
            if id(tensor) not in old:
                self._makers.setdefault(id(tensor), event)

    def maker(self, tensor: Tensor) -> Event | None:
        """The event that returned a tensor; None for inputs, parameters and tensors made in other ways."""
        return self._makers.get(id(tensor))

    def readers(self, tensor: Tensor) -> list[Event]:
        """The events that had this tensor, or another in its memory, as an argument."""
        return self._readers.get(memory_of(tensor), [])

    def calls(self, norm: str) -> list[Event]:
        """The calls of a norm layer."""
        return [event for event in self.events if event.norm == norm]


def memory_of(tensor: Tensor) -> int:
    """A number that is the same for all tensors of one storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a layout without a storage: sparse, mkldnn
        return id(tensor)


def record(
    model: nn.Module,
    norms: Mapping[str, nn.Module],
    example: Any,
    forward: Forward | None = None,
    *,
    in_mode: Callable[[nn.Module], AbstractContextManager[None]] = in_evaluation,
) -> Flow:
    """Run a model on an example, in evaluation, and return what it did. The model is left as it was.

    A call of one of `norms` is one event. For every layer that calls an operator itself, `results` has a copy of the
    output of each of its calls. `in_mode` may be another block that the model runs in.
    """
    recorder = _Recorder()
    with untouched(model), in_mode(model), recorder.layers(model, norms), select.backend("reference"), recorder:
        outputs = run_example(model, example, forward)
        recorder.finish(model, outputs)
    return recorder.flow


class _Running:
    """A layer that is being called."""

    def __init__(self, name: str) -> None:
        self.name, self.calls_operators = name, False


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._running = [_Running("")]
        self._norms_running = 0
        self._is_muted = False

    @property
    def _is_recording(self) -> bool:
        """Not inside a norm, which is one event, and not while the recorder makes copies for itself."""
        return not self._norms_running and not self._is_muted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where composite operators arrive before they are decomposed
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        outputs = func(*args, **kwargs)
        if self._is_recording:
            self._running[-1].calls_operators = True
            self.flow.add(Event(func, args, kwargs, outputs, self._running[-1].name))
        return outputs

    def layers(self, model: nn.Module, norms: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Keep track of which layer is running."""
        pairs = [
            (layer, self._norm_hooks(name) if name in norms else self._layer_hooks(name))
            for name, layer in named_layers(model)
        ]
        before = [(layer, enter) for layer, (enter, _) in pairs]
        return hooked(before=before, after=[(layer, leave) for layer, (_, leave) in pairs], always=True)

    def _layer_hooks(self, name: str) -> tuple[BeforeForward, AfterForward]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(_Running(name))

        def leave(layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            calls_operators = self._running.pop().calls_operators
            if self._is_recording:
                self._add_result(name, outputs, calls_operators)

        return enter, leave

    def _norm_hooks(self, name: str) -> tuple[BeforeForward, AfterForward]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self._norms_running += 1

        def leave(layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            self._norms_running -= 1
            if self._is_recording:
                self.flow.add(Event(None, args, kwargs, outputs, self._running[-1].name, name))
                self._add_result(name, outputs, True)

        return enter, leave

    def _add_result(self, name: str, outputs: Any, copied: bool) -> None:
        tensors = tensors_in(outputs)
        for tensor in tensors:
            self.flow.given_by[memory_of(tensor)].add(name)
        if copied:
            self.flow.results[name].append(self._copies(tensors))

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies, which later operators do not write to; making them is not an event."""
        self._is_muted = True
        try:
            return [tensor.detach().clone() for tensor in tensors]
        finally:
            self._is_muted = False

    def finish(self, model: nn.Module, outputs: Any) -> None:
        """Record the model's outputs, and the tensors that its layers have kept."""
        found = outputs_of(outputs)
        self.flow.outputs = self._copies(found)
        self.flow.given_out = {memory_of(tensor) for tensor in found}
        for name, layer in named_layers(model):
            for tensor in tensors_in(vars(layer)):
                self.flow.kept.setdefault(memory_of(tensor), name)


def outputs_of(outputs: Any) -> list[Tensor]:
    """The tensors of a model's output, also where they are attributes of an object."""
    return tensors_in(outputs) or tensors_in(getattr(outputs, "__dict__", None))
