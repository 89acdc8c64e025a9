"""An ONNX model, read by onnx and run by onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.batches import tensors_in
from normkit.errors import NormkitError
from normkit.optional import required
from normkit.surgery.check_export.exported import ROLES, ExportedNorm

_NORMS = {
    "BatchNormalization": ROLES,
    "InstanceNormalization": ROLES[:2],
    "GroupNormalization": ROLES[:2],
    "LayerNormalization": ROLES[:2],
    "RMSNormalization": ROLES[:1],
    "SimplifiedLayerNormalization": ROLES[:1],
}


class OnnxError(NormkitError, ValueError):
    """A file that is not an ONNX model, or that onnxruntime does not run."""


class OnnxGraph:
    """The graph of an ONNX model."""

    def __init__(self, source: Any) -> None:
        """Read a path, or take a ModelProto."""
        self._source = source
        self.what = os.fspath(source) if isinstance(source, str | os.PathLike) else "the ONNX model"
        self._model = _read(source)
        self._values = {tensor.name: tensor for tensor in self._model.graph.initializer}

    def norms(self) -> Iterator[ExportedNorm]:
        """Nodes of ONNX's normalization operators, also inside functions and branches."""
        for part in (self._model.graph, *self._model.functions):
            yield from (self._norm(node) for node in _nodes(part) if node.op_type in _NORMS)

    def written(self) -> set[str]:
        """Nothing: running an ONNX model does not change it."""
        return set()

    def runner(self) -> nn.Module:
        """A module that passes its arguments to onnxruntime."""
        return OnnxModel(self._source, self.what)

    def _norm(self, node: Any) -> ExportedNorm:
        helper = _required("onnx").helper
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        roles = dict(zip(_NORMS[node.op_type], node.input[1:], strict=False))
        momentum = given.get("momentum")
        return ExportedNorm(
            _layer(node, roles),
            node.op_type,
            given.get("epsilon", 1e-5),
            None if momentum is None else 1 - momentum,  # in ONNX it weights the old value
            bool(given.get("training_mode", 0)),
            {role: self._tensor(name) for role, name in roles.items() if name in self._values},
        )

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(_required("onnx").numpy_helper.to_array(self._values[name]).copy())


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:  # the branches of an If, the body of a Loop
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _layer(node: Any, roles: dict[str, str]) -> str | None:
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


class OnnxModel(nn.Module):
    """An ONNX model as a module that runs in onnxruntime."""

    def __init__(self, source: Any, what: str) -> None:
        super().__init__()
        runtime = _required("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what it logs is also in its exceptions
        content = os.fspath(source) if isinstance(source, str | os.PathLike) else source.SerializeToString()
        try:
            self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base
            raise OnnxError(f"onnxruntime does not take {what}: {error}") from error

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Pass keyword arguments by the names of the model's inputs, and all other tensors in order."""
        names = [given.name for given in self._session.get_inputs()]
        feeds = {name: value for name, value in kwargs.items() if name in names}
        others = tensors_in([*args, *(value for name, value in kwargs.items() if name not in names)])
        free = [name for name in names if name not in feeds]
        if len(free) != len(others):
            raise OnnxError(f"the model takes {', '.join(names) or 'nothing'}; got {len(others) + len(feeds)} tensors.")
        feeds.update(zip(free, others, strict=True))
        outputs = self._session.run(None, {name: value.detach().cpu().numpy() for name, value in feeds.items()})
        return [torch.as_tensor(output) for output in outputs]


def _read(source: Any) -> Any:
    onnx = _required("onnx")
    if not isinstance(source, str | os.PathLike):
        return source
    if not Path(source).is_file():
        raise OnnxError(f"{os.fspath(source)} does not exist, or is not a file.")
    try:
        model = onnx.load(os.fspath(source))
    except Exception as error:  # protobuf's errors are of a package that is not a dependency of ours
        raise OnnxError(f"{os.fspath(source)} is not an ONNX model: {error}") from error
    if not model.ir_version or not model.graph.node:
        raise OnnxError(f"{os.fspath(source)} is not an ONNX model: it holds no graph.")
    return model


def _required(module: str) -> Any:
    return required(module, "checking an ONNX model", extra="export")
