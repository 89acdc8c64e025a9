from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.check_export.graph_module import ModuleGraph


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
    """Operators alone: a layer that a graph calls has a mode, which can be changed."""
    if isinstance(model, fx.GraphModule):
        for norm in ModuleGraph(model).operators():
            if norm.trains:
                yield norm.layer or "", norm.op


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
