"""What a model really does on an example: every operator it calls, on what, seen while it runs eagerly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.kernels import select
from normkit.named_layers import named_layers
from normkit.snapshot import untouched
from normkit.surgery.parity import run_example


class Event:
    """A call of an operator, or of a whole norm layer, whose inside does not matter.

    Attributes:
        index: its place in the order of events.
        func: the operator; None for a norm layer.
        norm: the norm layer's name; None for an operator.
        where: name of the innermost layer that was running.
        outputs: the tensors that came out. They and the arguments are kept, so that no two tensors share an identity.
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
    """The events of one forward, and who makes and reads which tensor.

    Reading is a matter of memory and not of tensors: a view of an output, or what `.data` gives, is that output.

    Attributes:
        events: in their order.
        results: copies of what came out of each call of a layer, for norms and layers that call operators themselves.
        outputs: copies of the model's own.
        given_by: the layers whose output is in a memory.
        given_out: the memories of the model's own output.
        kept: memories that layers had hold of when all was done.
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
        """Note the next event."""
        event.index = len(self.events)
        self.events.append(event)
        for memory in {memory_of(tensor) for tensor in event.inputs}:
            self._readers[memory].append(event)
        old = {id(tensor) for tensor in event.inputs}
        for tensor in event.outputs:
            if id(tensor) not in old:
                self._makers.setdefault(id(tensor), event)

    def maker(self, tensor: Tensor) -> Event | None:
        """The event that a tensor came out of; None for inputs, parameters and what other means have made."""
        return self._makers.get(id(tensor))

    def readers(self, tensor: Tensor) -> list[Event]:
        """The events that got this tensor, or anything else in its memory."""
        return self._readers.get(memory_of(tensor), [])

    def calls(self, norm: str) -> list[Event]:
        """The calls of a norm layer."""
        return [event for event in self.events if event.norm == norm]


def memory_of(tensor: Tensor) -> int:
    """What is the same for all tensors that see the same memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a layout without a storage: sparse, mkldnn
        return id(tensor)


def watch(model: nn.Module, norms: Mapping[str, nn.Module], example: Any, forward: Forward | None = None) -> Flow:
    """Run a model on an example, in evaluation, and return what it did. The model is left as it was.

    A call of one of `norms` is one event. Of every layer that calls an operator itself, `results` has a copy of what
    came out of each of its calls.
    """
    watching = _Watching()
    with untouched(model), in_evaluation(model), watching.layers(model, norms), select.backend("reference"), watching:
        outputs = run_example(model, example, forward)
        watching.finish(model, outputs)
    return watching.flow


class _Running:
    """A layer that is being called."""

    def __init__(self, name: str) -> None:
        self.name, self.calls_operators = name, False


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._running = [_Running("")]
        self._in_norm = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where composite operators come here before they are taken apart
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        outputs = func(*args, **kwargs)
        if not self._in_norm:
            self._running[-1].calls_operators = True
            self.flow.add(Event(func, args, kwargs, outputs, self._running[-1].name))
        return outputs

    @contextmanager
    def layers(self, model: nn.Module, norms: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow which layer is running."""
        handles = []
        for name, layer in named_layers(model):
            enter, leave = self._norm(name) if name in norms else self._layer(name)
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(leave, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, name: str) -> tuple[Any, Any]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(_Running(name))

        def leave(layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            calls_operators = self._running.pop().calls_operators
            if not self._in_norm:
                self._note(name, outputs, calls_operators)

        return enter, leave

    def _norm(self, name: str) -> tuple[Any, Any]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self._in_norm += 1

        def leave(layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            self._in_norm -= 1
            if not self._in_norm:
                self.flow.add(Event(None, args, kwargs, outputs, self._running[-1].name, name))
                self._note(name, outputs, True)

        return enter, leave

    def _note(self, name: str, outputs: Any, copied: bool) -> None:
        tensors = tensors_in(outputs)
        for tensor in tensors:
            self.flow.given_by[memory_of(tensor)].add(name)
        if copied:
            self.flow.results[name].append(self._copies(tensors))

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """What nobody will write over."""
        self._in_norm += 1  # no part of the model
        copies = [tensor.detach().clone() for tensor in tensors]
        self._in_norm -= 1
        return copies

    def finish(self, model: nn.Module, outputs: Any) -> None:
        """Note what has come out, and what has stayed inside."""
        found = outputs_of(outputs)
        self.flow.outputs = self._copies(found)
        self.flow.given_out = {memory_of(tensor) for tensor in found}
        for name, layer in named_layers(model):
            for tensor in tensors_in(vars(layer)):
                self.flow.kept.setdefault(memory_of(tensor), name)


def outputs_of(outputs: Any) -> list[Tensor]:
    """The tensors of a model's output, also of an object that only has attributes."""
    return tensors_in(outputs) or tensors_in(getattr(outputs, "__dict__", None))
