from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.check_export.program import arguments_of, trains


@rule("NK501", "training-mode-export", severity="error", seen_by=("examine", "export"))
def training_mode_export(evidence: Evidence) -> Iterator[Finding]:
    """An exported graph normalizes with batch statistics.

    Why it hurts: the mode is written into the graph. It cannot be changed afterwards: every prediction depends on the
    others in its batch, and a batch of one fails or is zeroed.

    Evidence and threshold: an operator of the graph that takes the statistics of its input (`training=True`). Examine
    reads traced modules and `ExportedProgram.module()`; `nk.check_export` reads programs and ONNX files and also
    compares outputs.

    Not a fault when: the graph is meant to be trained further.

    Remedy: `model.eval()` before exporting.
    """
    for layer, operator in _training_nodes(evidence.model):
        yield found(
            training_mode_export,
            layer,
            f"{operator} normalizes with the statistics of the batch it is given, and the graph cannot be changed to "
            "evaluation.",
            "Export it again, after model.eval().",
            op=operator,
        )


def is_graph(model: nn.Module) -> bool:
    """Whether a model is a recorded graph, whose layers are operators and not modules."""
    return isinstance(model, torch.jit.ScriptModule | fx.GraphModule)


def _training_nodes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The norms of a graph that use the statistics of their batch: the layer with their tensors, and the operator."""
    nodes = _scripted(model) if isinstance(model, torch.jit.ScriptModule) else _graphed(model)
    return iter(dict.fromkeys(nodes))


def _graphed(model: nn.Module) -> Iterator[tuple[str, str]]:
    for module in model.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if hasattr(node.target, "_schema") and "norm" in node.target._schema.name:
                given = arguments_of(node)
                if ("eps" in given or "epsilon" in given) and trains(node, given):
                    yield _layer_of(node, given), str(node.target)


def _layer_of(node: Any, given: dict[str, Any]) -> str:
    """The layer whose tensors a node takes, or else in whose forward it was called."""
    for value in given.values():
        if isinstance(value, fx.Node) and value.op == "get_attr":
            return str(value.target).rpartition(".")[0]
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).partition("@")[0] if stack else ""


def _scripted(model: torch.jit.ScriptModule) -> Iterator[tuple[str, str]]:
    graph: Any = model.inlined_graph  # its nodes live as long as it does
    for node in graph.findAllNodes("aten::batch_norm"):
        inputs = list(node.inputs())  # input, weight, bias, running_mean, running_var, training, ...
        if inputs[5].toIValue() is True:
            paths = [path for value in inputs[1:5] if (path := _attribute_path(value))]
            yield paths[0].rpartition(".")[0] if paths else "", "aten::batch_norm"


def _attribute_path(value: Any) -> str:
    """The name of an attribute of the model that a value of a TorchScript graph is read from; empty if it is none."""
    parts: list[str] = []
    node = value.node()
    while node.kind() == "prim::GetAttr":
        parts.insert(0, node.s("name"))
        node = next(iter(node.inputs())).node()
    return ".".join(parts)
