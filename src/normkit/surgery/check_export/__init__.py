"""Whether an exported model is the same as the model: stored statistics, the same eps, the same outputs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.errors import ArgumentError
from normkit.finding import Finding
from normkit.snapshot import untouched
from normkit.surgery.check_export.batch_mates import depends_on_mates
from normkit.surgery.check_export.exported import Exported, ExportedNorm, matched
from normkit.surgery.check_export.onnx import OnnxError, OnnxGraph
from normkit.surgery.norms import STATISTICS, Norm, norms
from normkit.surgery.parity import ExampleError, Trace, compare, run_example, tolerance
from normkit.surgery.result import Change, Parity

_SAME_SETTING = 1e-5  # ONNX keeps eps and momentum in float32

_EVALUATE = "Export it in evaluation: model.eval() first."
_NOTHING_STORED = (
    "It stores no statistics, so evaluation has no others: convert it, or train it with running statistics."
)

Pairs = list[tuple[ExportedNorm, Norm | None]]  # nodes of the graph, and the layers that they come from


@dataclass(frozen=True)
class ExportCheck:
    """The result of `check_export`.

    Attributes:
        findings: NK501 training-mode-export, NK502 manifest-drift, NK504 unequal-export.
        parity: how far the outputs are from the model's on the example, in evaluation; None if the exported model
            could not be run, for a reason that is among the findings.
        skipped: norms of the model whose eps and mode are not in the graph; only their outputs are compared.
    """

    findings: Sequence[Finding]
    parity: Parity | None
    skipped: Sequence[Change]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["the exported model is the model"]
        if self.parity is not None:
            lines.append(f"outputs differ by {self.parity.max_abs:.2g} ({self.parity.max_rel:.2g} relative)")
        return "\n".join(lines + [f"not checked: {change}" for change in self.skipped])


def check_export(
    program: Any, model: nn.Module, example: Any, *, forward: Forward | None = None, rtol: float | None = None
) -> ExportCheck:
    """Compare an exported model with the model it was made from, which is left as it is.

    Args:
        program: a torch.export.ExportedProgram, the path of an ONNX file, an onnx.ModelProto, or what
            torch.onnx.export(dynamo=True) returns. ONNX needs the extra `export`.
        model: the model. Its mode does not matter: it is run in evaluation.
        example: a batch that both accept.
        forward: forward(model, batch) instead of the usual way to run a model on a batch; also called with the
            exported model.
        rtol: how far outputs may be apart, relative to the largest magnitude of each. By default set by the coarsest
            type among outputs and parameters: 1e-10 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got a {type(model).__name__}.")
    exported = _opened(program)
    with in_evaluation(model):
        expected = _run(model, example, forward)
    layers = norms(model)
    pairs = list(matched(exported.norms(), model, layers))
    findings = [*_training(exported, pairs, layers), *_drift(pairs)]
    skipped = _unchecked(pairs, layers)
    try:
        parity = compare(Trace(expected, []), Trace(_run(exported.runner(), example, forward), []))
    except (OnnxError, ExampleError) as error:
        if not findings:  # else they may be the cause: onnxruntime does not run every norm in training mode
            raise
        return ExportCheck(findings, None, [*skipped, Change("", "outputs not compared", str(error))])
    limit = tolerance(model, expected) if rtol is None else rtol
    if not parity.max_rel <= limit:
        if not findings and _mixes_batch(exported, model, example, forward):
            findings.append(_mates())
        findings.append(_unequal(exported, parity, limit))
    return ExportCheck(findings, parity, skipped)


def _opened(program: Any) -> Exported:
    from torch.export import ExportedProgram

    from normkit.surgery.check_export.program import ProgramGraph

    if isinstance(program, ExportedProgram):
        return ProgramGraph(program)
    if isinstance(program, str | os.PathLike):
        return OnnxGraph(program)
    proto = getattr(program, "model_proto", program)  # an attribute of torch's ONNXProgram
    if hasattr(proto, "SerializeToString") and hasattr(proto, "graph"):
        return OnnxGraph(proto)
    raise ArgumentError(
        "check_export needs a torch.export.ExportedProgram, the path of an ONNX file or an onnx.ModelProto; got a "
        f"{type(program).__name__}."
    )


def _training(exported: Exported, pairs: Pairs, layers: list[Norm]) -> list[Finding]:
    """Norms that use the statistics of the batch, or update their own."""
    found: dict[str | None, Finding] = {}
    for node, norm in pairs:
        if node.trains:
            layer = node.layer if norm is None else norm.name
            message = f"{node.op} normalizes with the statistics of the batch it is given."
            found[layer] = _training_finding(layer, message, {"op": node.op}, _remedy(norm))
    names = {norm.name for norm in layers}
    is_known = bool(found)  # if not, written buffers count also under names that the model does not have
    for tensor in sorted(exported.written()):
        layer, _, role = tensor.rpartition(".")
        if layer not in found and (layer in names or (role in STATISTICS and not is_known)):
            message = f"every run of {exported.what} writes {tensor}."
            found[layer] = _training_finding(layer, message, {"buffer": tensor})
    return list(found.values())


def _training_finding(layer: str | None, message: str, evidence: dict[str, Any], remedy: str = _EVALUATE) -> Finding:
    return Finding("NK501", "training-mode-export", "error", layer, message, evidence, remedy)


def _remedy(norm: Norm | None) -> str:
    is_without = norm is not None and norm.spec.updates == "never" and norm.spec.uses == "batch"
    return _NOTHING_STORED if is_without else _EVALUATE


def _drift(pairs: Pairs) -> list[Finding]:
    """Layers whose settings differ in the graph."""
    found: dict[str, Finding] = {}
    for node, norm in pairs:
        evidence = {} if norm is None else _changed_settings(node, norm)
        if norm is not None and evidence:
            changes = "; ".join(
                f"{name} is {there:.6g} in the exported model, {here:.6g} in the model"
                for name, (there, here) in evidence.items()
            )
            remedy = "Export the model again, or find what changed it, such as a pass of quantization."
            found[norm.name] = Finding("NK502", "manifest-drift", "error", norm.name, f"{changes}.", evidence, remedy)
    return list(found.values())


def _changed_settings(node: ExportedNorm, norm: Norm) -> dict[str, tuple[float, float]]:
    """By name, the value in the graph and the value of the layer."""
    both = {"eps": (node.eps, norm.spec.eps), "momentum": (node.momentum, norm.spec.momentum)}
    known = {name: (there, here) for name, (there, here) in both.items() if there is not None and here is not None}
    return {name: pair for name, pair in known.items() if not math.isclose(*pair, rel_tol=_SAME_SETTING)}


def _unchecked(pairs: Pairs, layers: list[Norm]) -> list[Change]:
    seen = {norm.name for _, norm in pairs if norm is not None}
    why = "no operator of the graph is this layer: it was folded into its neighbors, or decomposed into arithmetic"
    return [Change(norm.name, "eps and mode not compared", why) for norm in layers if norm.name not in seen]


def _run(runner: nn.Module, example: Any, forward: Forward | None) -> list[Tensor]:
    with untouched(runner), torch.no_grad():
        return [tensor.clone() for tensor in tensors_in(run_example(runner, example, forward))]


def _unequal(exported: Exported, parity: Parity, limit: float) -> Finding:
    return Finding(
        "NK504",
        "unequal-export",
        "error",
        None,
        f"outputs of {exported.what} differ from the model's in evaluation by {parity.max_abs:.3g}, which is "
        f"{parity.max_rel:.3g} of the largest; {limit:.3g} is allowed.",
        {"max_abs": parity.max_abs, "max_rel": parity.max_rel, "tolerance": limit},
        "Export the model as it is now, in evaluation, with the same weights.",
    )


def _mixes_batch(exported: Exported, model: nn.Module, example: Any, forward: Forward | None) -> bool:
    """Whether an output depends on the rest of the batch, while it does not in the model in evaluation."""
    with in_evaluation(model):
        is_models_own = depends_on_mates(model, example, forward)
    return not is_models_own and depends_on_mates(exported.runner(), example, forward)


def _mates() -> Finding:
    message = (
        "the output of an example depends on the others in its batch, which it does not in the model in evaluation."
    )
    return _training_finding(None, message, {})
