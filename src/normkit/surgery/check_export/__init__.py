"""Whether an exported model is the same as the model: stored statistics, the same eps, the same outputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.errors import ArgumentError
from normkit.finding import Finding
from normkit.snapshot import untouched
from normkit.surgery.check_export import findings as found
from normkit.surgery.check_export.batch_mates import depends_on_mates
from normkit.surgery.check_export.exported import Exported, matched
from normkit.surgery.check_export.onnx import OnnxError, OnnxGraph
from normkit.surgery.norms import Norm, norms
from normkit.surgery.parity import ExampleError, Trace, compare, run_example, tolerance
from normkit.surgery.result import Change, Parity

_ROUNDED = "it rounds values to integers on the way; pass rtol= to say how far its outputs may be from the model's"


@dataclass(frozen=True)
class ExportCheck:
    """The result of `check_export`.

    Attributes:
        findings: NK501 training-mode-export, NK502 manifest-drift, NK504 unequal-export.
        parity: how far the outputs are from the model's on the example; None if the exported model could not be run,
            for a reason that is among the findings.
        skipped: norms of the model whose eps and mode are not in the graph, of which only the outputs are compared,
            and outputs that are not judged.
    """

    findings: Sequence[Finding]
    parity: Parity | None
    skipped: Sequence[Change]

    @property
    def ok(self) -> bool:
        """Whether no error and no warning was found."""
        return all(finding.severity == "info" for finding in self.findings)

    def __str__(self) -> str:
        lines = ["the exported model is the model"] if self.ok else []
        lines += [str(finding) for finding in self.findings]
        if self.parity is not None:
            lines.append(f"outputs differ by {self.parity.max_abs:.2g} ({self.parity.max_rel:.2g} relative)")
        return "\n".join(lines + [f"not checked: {change}" for change in self.skipped])


def check_export(
    program: Any, model: nn.Module, example: Any, *, forward: Forward | None = None, rtol: float | None = None
) -> ExportCheck:
    """Compare an exported model with the model it was made from, which is left as it is.

    Args:
        program: a torch.export.ExportedProgram; a torch.fx.GraphModule, traced, exported, or prepared or converted by
            torchao's or torch's quantization; the path of an ONNX file, an onnx.ModelProto, or what
            torch.onnx.export(dynamo=True) returns. ONNX needs the extra `export`.
        model: the model. It is run in evaluation, whatever its mode; only a GraphModule, which may still be trained,
            is compared with the model in the mode that the model is in.
        example: a batch that both accept.
        forward: forward(model, batch) instead of the usual way to run a model on a batch; also called with the
            exported model.
        rtol: how far outputs may be apart, relative to the largest magnitude of each. By default set by the coarsest
            type among outputs and parameters: 1e-10 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16.
            Simulated quantization is switched off for the comparison; outputs of a graph that is quantized in earnest
            are measured, and judged only if rtol is given.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got a {type(model).__name__}.")
    exported = _opened(program)
    in_training = exported.is_trainable and model.training
    with nullcontext() if in_training else in_evaluation(model):
        expected = _run(model, example, forward)
    layers = norms(model)
    pairs = list(matched(exported.norms(), model, layers))
    causes = [*found.training(exported, pairs, layers, in_training), *found.drift(pairs, in_training)]
    findings = [*causes, *found.written_out(exported, pairs, layers)]
    skipped = _unchecked(pairs, layers)
    try:
        parity = compare(Trace(expected, []), Trace(_run(exported.runner(), example, forward), []))
    except (OnnxError, ExampleError) as error:
        if not causes:  # else they may explain it: onnxruntime does not run every norm in training mode
            raise
        return ExportCheck(findings, None, [*skipped, Change("", "outputs not compared", str(error))])
    limit = tolerance(model, expected) if rtol is None else rtol
    if rtol is None and exported.is_quantized:
        limit = sys.float_info.max  # that they are numbers at all can be asked for
        skipped.append(Change("", "outputs measured, not judged", _ROUNDED))
    if not parity.max_rel <= limit:
        if not causes and not in_training and _mixes_batch(exported, model, example, forward):
            findings.append(found.mixing())
        findings.append(found.unequal(exported, parity, limit, "training" if in_training else "evaluation"))
    return ExportCheck(findings, parity, skipped)


def _opened(program: Any) -> Exported:
    from torch.export import ExportedProgram

    from normkit.surgery.check_export.graph_module import ModuleGraph
    from normkit.surgery.check_export.program import ProgramGraph

    if isinstance(program, ExportedProgram):
        return ProgramGraph(program)
    if isinstance(program, fx.GraphModule):
        return ModuleGraph(program)
    if isinstance(program, str | os.PathLike):
        return OnnxGraph(program)
    proto = getattr(program, "model_proto", program)  # an attribute of torch's ONNXProgram
    if hasattr(proto, "SerializeToString") and hasattr(proto, "graph"):
        return OnnxGraph(proto)
    raise ArgumentError(
        "check_export needs a torch.export.ExportedProgram, a torch.fx.GraphModule, the path of an ONNX file or an "
        f"onnx.ModelProto; got a {type(program).__name__}."
    )


def _unchecked(pairs: found.Pairs, layers: list[Norm]) -> list[Change]:
    seen = {norm.name for _, norm in pairs if norm is not None}
    why = "no operator of the graph is this layer: it was folded into its neighbors, or decomposed into arithmetic"
    return [Change(norm.name, "eps and mode not compared", why) for norm in layers if norm.name not in seen]


def _run(runner: nn.Module, example: Any, forward: Forward | None) -> list[Tensor]:
    with untouched(runner), torch.no_grad():
        return [tensor.clone() for tensor in tensors_in(run_example(runner, example, forward))]


def _mixes_batch(exported: Exported, model: nn.Module, example: Any, forward: Forward | None) -> bool:
    """Whether an output depends on the rest of the batch, while it does not in the model in evaluation."""
    with in_evaluation(model):
        is_models_own = depends_on_mates(model, example, forward)
    return not is_models_own and depends_on_mates(exported.runner(), example, forward)
