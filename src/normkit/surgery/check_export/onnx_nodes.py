"""The nodes of an ONNX graph: which layers they come from, and what they do to the statistics of a norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch

from normkit.optional import required
from normkit.surgery.check_export.written_out import Kind, Step

_KINDS: dict[str, Kind] = {
    "ReduceMean": "mean",
    "Sqrt": "root",
    "Add": "pass",
    "Cast": "pass",
    "Clip": "pass",
    "Max": "pass",
    "Reshape": "pass",
    "Unsqueeze": "pass",
}
_POWERS: dict[float, Kind] = {2: "square", 0.5: "root", -0.5: "root"}


def library(module: str) -> Any:
    """The module onnx or onnxruntime, or an error that names the extra they come with."""
    return required(module, "checking an ONNX model", extra="export")


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes of a graph, also inside the branches of an If and the body of a Loop."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_of(inner)


def layer_of(node: Any, roles: Mapping[str, str]) -> str | None:
    """The owner of the tensors it takes, if these kept their names; else the layer that the exporter names."""
    for role, name in roles.items():
        if name.endswith(f".{role}") or name == role:
            return name.rpartition(".")[0]
    for prop in node.metadata_props:
        if prop.key == "pkg.torch.onnx.name_scopes":
            scopes = [scope for scope in _listed(prop.value)[:-1] if scope]
            return scopes[-1] if scopes else ""
    return node.name.strip("/").rpartition("/")[0].replace("/", ".") if node.name.startswith("/") else None


def _listed(text: str) -> list[str]:
    """The names of a list that was printed: "['', 'layer1', 'layer1.bn', 'batch_norm']"."""
    return [part.strip().strip("'\"") for part in text.strip("[]").split(",")]


def steps(model: Any) -> dict[str, Step]:
    """What a model's nodes do, by the names of the tensors they compute."""
    types, numbers = _half_types(model), _numbers(model.graph)
    return {
        output: Step(_kind(node, numbers), node.input, types.get(output), layer_of(node, {}))
        for node in nodes_of(model.graph)
        for output in node.output
    }


def _kind(node: Any, numbers: Mapping[str, float]) -> Kind:
    if node.op_type == "Pow":
        return _POWERS.get(numbers.get(node.input[1], 1.0), "other")
    if node.op_type == "Mul" and node.input[0] == node.input[1]:
        return "square"
    return _KINDS.get(node.op_type, "other")


def _half_types(model: Any) -> dict[str, torch.dtype]:
    """The tensors that are known to be of a half type."""
    onnx = library("onnx")
    if not model.graph.value_info:  # the exporter noted no types
        with suppress(ValueError):  # a model of more than 2 GB, which protobuf does not hand over: then none are known
            model = onnx.shape_inference.infer_shapes(model)
    halves = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}
    values = (*model.graph.value_info, *model.graph.output)
    return {
        value.name: halves[value.type.tensor_type.elem_type]
        for value in values
        if value.type.tensor_type.elem_type in halves
    }


def _numbers(graph: Any) -> dict[str, float]:
    """The constants of one value: exponents are among them."""
    read = library("onnx").numpy_helper.to_array
    held = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            held |= dict(zip(node.output, values, strict=False))
    return {name: float(read(tensor).reshape(())) for name, tensor in held.items() if prod(tensor.dims) == 1}
