"""An ExportedProgram of torch.export, read and run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from normkit.surgery.check_export.exported import ROLES, ExportedNorm


class ProgramGraph:
    """The graph of an exported program."""

    what = "the exported program"

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        signature = program.graph_signature
        self._tensor_names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def norms(self) -> Iterator[ExportedNorm]:
        """Nodes of operators with "norm" in their name and an eps: batch, instance, group, layer, RMS."""
        for node in self._nodes():
            given = arguments_of(node)
            eps = given.get("eps", given.get("epsilon"))
            if "norm" in node.target._schema.name and ("eps" in given or "epsilon" in given):
                yield ExportedNorm(
                    self._layer(node, given),
                    str(node.target),
                    eps,
                    given.get("momentum"),
                    trains(node, given),
                    self._values(given),
                )

    def written(self) -> set[str]:
        """Buffers that an operator writes in place, or that the program returns for an update."""
        in_place = [
            given[argument.name]
            for node in self._nodes()
            for given in [arguments_of(node)]
            for argument in node.target._schema.arguments
            if argument.is_write
        ]
        names = {self._tensor_names.get(given.name) for given in in_place if isinstance(given, fx.Node)}
        return {name for name in names if name} | set(self._program.graph_signature.buffers_to_mutate.values())

    def runner(self) -> nn.Module:
        """The program as a module. It may share its tensors with the model it was made from."""
        return self._program.module()

    def _nodes(self) -> Iterator[Any]:
        """Calls of operators, also in the graphs inside the graph: the branches of a cond."""
        for module in self._program.graph_module.modules():
            if isinstance(module, fx.GraphModule):
                yield from (node for node in module.graph.nodes if hasattr(node.target, "_schema"))

    def _layer(self, node: fx.Node, given: dict[str, Any]) -> str | None:
        """The owner of the tensors that it takes, or else the module in whose forward it was called."""
        for role in ROLES:
            if (name := self._name(given.get(role))) is not None:
                return name.rpartition(".")[0]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return str(stack[-1][0]).partition("@")[0] if stack else None

    def _name(self, value: Any) -> str | None:
        return self._tensor_names.get(value.name) if isinstance(value, fx.Node) else None

    def _values(self, given: dict[str, Any]) -> dict[str, Tensor]:
        names = {role: self._name(given.get(role)) for role in ROLES}
        held = self._program.state_dict
        return {role: held[name].detach().cpu() for role, name in names.items() if name in held}


def arguments_of(node: Any) -> dict[str, Any]:
    """The arguments of an operator by name, defaults included."""
    arguments = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(arguments, node.args, strict=False)})
    return given | dict(node.kwargs)


def trains(node: Any, given: dict[str, Any]) -> bool:
    """Whether a node normalizes with the statistics of what it is given."""
    if "use_input_stats" in given:  # an instance norm always uses its input's, unless it stores some
        return bool(given["use_input_stats"]) and given.get("running_mean") is not None
    return bool(given.get("training", False)) or "_with_update" in node.target._schema.name
