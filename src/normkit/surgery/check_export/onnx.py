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
from normkit.surgery.check_export.exported import ROLES, ExportedNorm, MissingOperator
from normkit.surgery.check_export.onnx_nodes import layer_of, library, nodes_of, steps
from normkit.surgery.check_export.written_out import HalfNorms, half_norms

_NORMS = {
    "BatchNormalization": ROLES,
    "InstanceNormalization": ROLES[:2],
    "GroupNormalization": ROLES[:2],
    "LayerNormalization": ROLES[:2],
    "RMSNormalization": ROLES[:1],
    "SimplifiedLayerNormalization": ROLES[:1],
}
# By kind of norm, its operator and the opset since when it can hold any such norm: until 21, the GroupNormalization of
# opset 18 had one gamma and beta per group.
_SINCE = {"layer": ("LayerNormalization", 17), "group": ("GroupNormalization", 21), "rms": ("RMSNormalization", 23)}


class OnnxError(NormkitError, ValueError):
    """A file that is not an ONNX model, or that onnxruntime does not run."""


class OnnxGraph:
    """The graph of an ONNX model."""

    is_trainable = False

    def __init__(self, source: Any) -> None:
        """Read a path, or take a ModelProto."""
        self._source = source
        self.what = os.fspath(source) if isinstance(source, str | os.PathLike) else "the ONNX model"
        self._model = _read(source)
        self._values = {tensor.name: tensor for tensor in self._model.graph.initializer}

    def norms(self) -> Iterator[ExportedNorm]:
        """Nodes of ONNX's normalization operators, also inside functions and branches."""
        for part in (self._model.graph, *self._model.functions):
            yield from (self._norm(node) for node in nodes_of(part) if node.op_type in _NORMS)

    @property
    def is_quantized(self) -> bool:
        """Whether it rounds to integers on its way."""
        return any("Quantize" in node.op_type for node in nodes_of(self._model.graph))

    def half_norms(self) -> HalfNorms:
        """Norms written out as arithmetic, with their statistics in a half type."""
        return half_norms(steps(self._model))

    def missing_operator(self, kind: str) -> MissingOperator | None:
        """The operator for norms of this kind, if it came with a later opset than the model's."""
        operator, needs = _SINCE.get(kind, ("", 0))
        has = max(
            (opset.version for opset in self._model.opset_import if opset.domain in ("", "ai.onnx")), default=needs
        )
        return MissingOperator(operator, needs, has) if has < needs else None

    def written(self) -> set[str]:
        """Nothing: running an ONNX model does not change it."""
        return set()

    def runner(self) -> nn.Module:
        """A module that passes its arguments to onnxruntime."""
        return OnnxModel(self._source, self.what)

    def _norm(self, node: Any) -> ExportedNorm:
        helper = library("onnx").helper
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        roles = dict(zip(_NORMS[node.op_type], node.input[1:], strict=False))
        momentum = given.get("momentum")
        return ExportedNorm(
            layer_of(node, roles),
            node.op_type,
            given.get("epsilon", 1e-5),
            None if momentum is None else 1 - momentum,  # in ONNX it weights the old value
            bool(given.get("training_mode", 0)),
            {role: self._tensor(name) for role, name in roles.items() if name in self._values},
        )

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(library("onnx").numpy_helper.to_array(self._values[name]).copy())


class OnnxModel(nn.Module):
    """An ONNX model as a module that runs in onnxruntime."""

    def __init__(self, source: Any, what: str) -> None:
        super().__init__()
        runtime = library("onnxruntime")
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
    onnx = library("onnx")
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
