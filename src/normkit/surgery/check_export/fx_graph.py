"""What the graphs of torch.export and of torch.fx have in common: calls of operators, whose tensors have names."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from normkit.surgery.check_export.exported import ROLES, ExportedNorm
from normkit.surgery.check_export.written_out import HalfNorms, Kind, Step, half_norms

# What torch.fx records in place of an operator, where a model calls it by itself.
_FUNCTIONS = (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm)

_STEPS: dict[str, Kind] = {
    "aten::square": "square",
    "aten::mean": "mean",
    "aten::var": "variance",
    "aten::var_mean": "variance",
    "aten::sqrt": "root",
    "aten::rsqrt": "root",
    "aten::add": "pass",
    "aten::clamp": "pass",
    "aten::clamp_min": "pass",
    "aten::maximum": "pass",
    "aten::to": "pass",
    "aten::_to_copy": "pass",
    "aten::unsqueeze": "pass",
    "aten::view": "pass",
    "aten::expand": "pass",
}
_POWERS: dict[float, Kind] = {2: "square", 0.5: "root", -0.5: "root"}


class Call(NamedTuple):
    """A call in a graph: its node, the operator's name, and its arguments by name, defaults included."""

    node: Any
    name: str
    given: dict[str, Any]


class FxGraph:
    """A graph of torch.fx. Its subclasses know the names of the tensors in it, and how it is run."""

    def __init__(self, root: fx.GraphModule) -> None:
        self._root = root

    def norms(self) -> Iterator[ExportedNorm]:
        """All norms of the graph."""
        return self.operators()

    def operators(self) -> Iterator[ExportedNorm]:
        """Calls of operators with "norm" in their name and an eps: batch, instance, group, layer, RMS."""
        for node, name, given in self._calls():
            if "norm" in name and ("eps" in given or "epsilon" in given):
                yield ExportedNorm(
                    self._layer(node, given),
                    str(node.target) if hasattr(node.target, "_schema") else name,
                    given.get("eps", given.get("epsilon")),
                    given.get("momentum"),
                    trains(node, given),
                    self._values(given),
                )

    def written(self) -> set[str]:
        """Tensors that an operator writes in place."""
        in_place = [
            given.get(argument.name)
            for node, _, given in self._calls()
            if hasattr(node.target, "_schema")
            for argument in node.target._schema.arguments
            if argument.is_write
        ]
        return {name for name in map(self._name, in_place) if name}

    def half_norms(self) -> HalfNorms:
        """Norms written out as arithmetic, with their statistics in a half type."""
        found: HalfNorms = {}
        for graph in self._graphs():
            found |= half_norms({node.name: self._step(node) for node in graph.nodes})
        return found

    def missing_operator(self, kind: str) -> None:
        """Nothing: torch has an operator for every norm that it exports as one."""

    @property
    def is_quantized(self) -> bool:
        """Whether it rounds to integers on its way."""
        return any("quantize" in call.name for call in self._calls())

    def _name(self, value: Any) -> str | None:
        """The name of a tensor that the graph holds; None for all other values."""
        raise NotImplementedError

    def _held(self) -> Mapping[str, Tensor]:
        """The tensors that the graph holds, by name."""
        raise NotImplementedError

    def _graphs(self) -> Iterator[fx.Graph]:
        """The graph, and the graphs inside it: the branches of a cond."""
        yield from (module.graph for module in self._root.modules() if isinstance(module, fx.GraphModule))

    def _calls(self) -> Iterator[Call]:
        """The calls of operators."""
        for graph in self._graphs():
            yield from filter(None, map(_call, graph.nodes))

    def _step(self, node: fx.Node) -> Step:
        call = _call(node)
        given = {} if call is None else call.given
        inputs = [before.name for before in node.all_input_nodes]
        return Step(_kind(node, call), inputs, _dtype(node), self._layer(node, given))

    def _layer(self, node: fx.Node, given: dict[str, Any]) -> str | None:
        """The owner of the tensors that it takes, or else the module in whose forward it was called."""
        for role in ROLES:
            if (name := self._name(given.get(role))) is not None:
                return name.rpartition(".")[0]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return str(stack[-1][0]).partition("@")[0] if stack else None

    def _values(self, given: dict[str, Any]) -> dict[str, Tensor]:
        names = {role: self._name(given.get(role)) for role in ROLES}
        held = self._held()
        return {role: held[name].detach().cpu() for role, name in names.items() if name is not None and name in held}


def _call(node: Any) -> Call | None:
    """A node as a call; None for inputs, attributes, layers and functions that are no norms."""
    if hasattr(node.target, "_schema"):
        return Call(node, node.target._schema.name, arguments_of(node))
    if node.target in _FUNCTIONS:
        return Call(node, node.target.__name__, _of_function(node))
    return None


def arguments_of(node: Any) -> dict[str, Any]:
    """The arguments of an operator by name, defaults included."""
    arguments = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(arguments, node.args, strict=False)})
    return given | dict(node.kwargs)


def _of_function(node: Any) -> dict[str, Any]:
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def trains(node: Any, given: dict[str, Any]) -> bool:
    """Whether a node normalizes with the statistics of what it is given."""
    if "use_input_stats" in given:  # an instance norm always uses its input's, unless it stores some
        return bool(given["use_input_stats"]) and given.get("running_mean") is not None
    return bool(given.get("training", False)) or "_with_update" in str(node.target)


def _kind(node: fx.Node, call: Call | None) -> Kind:
    if call is None:
        return "pass" if node.target is operator.getitem else "other"  # one of an operator's several outputs
    name, given = call.name.removesuffix("_"), call.given  # the underscore: in place
    if name == "aten::pow":
        power = given.get("exponent")
        return _POWERS.get(power, "other") if isinstance(power, int | float) else "other"
    if name == "aten::mul" and given.get("self") is given.get("other"):
        return "square"
    return _STEPS.get(name, "other")


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The type of what a node computes, if the exporter noted it; of a tuple, the first's."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return first.dtype if isinstance(first, Tensor) else None
