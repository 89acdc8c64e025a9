"""What is found wrong with an exported graph, norm by norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from normkit.finding import Finding, Severity
from normkit.surgery.check_export.exported import Exported, ExportedNorm, MissingOperator
from normkit.surgery.norms import STATISTICS, Norm
from normkit.surgery.result import Parity

Pairs = list[tuple[ExportedNorm, Norm | None]]  # nodes of the graph, and the layers that they come from

_SAME_SETTING = 1e-5  # ONNX keeps eps and momentum in float32

_EVALUATE = "Export it in evaluation: model.eval() first."
_EVALUATE_GRAPH = (
    "Move it to evaluation (move_exported_model_to_eval of torchao.quantization.pt2e), or trace or export "
    "model.eval(). To compare a graph that is still to be trained, pass model.train()."
)
_NOTHING_STORED = (
    "It stores no statistics, so evaluation has no others: convert it, or train it with running statistics."
)
_EXPORT_AGAIN = "Export the model again, or find what changed it, such as a pass of quantization."
_HALF = {
    torch.float16: "which ends at 65504: inputs of 256 overflow",
    torch.bfloat16: "which has 8 significant bits",
}


def training(exported: Exported, pairs: Pairs, layers: list[Norm], in_training: bool) -> list[Finding]:
    """Norms that use the statistics of the batch, or update their own, unless the layer does so as well."""
    found: dict[str | None, Finding] = {}
    for node, norm in pairs:
        if node.trains and not (in_training and _uses_batch(norm)):
            layer = node.layer if norm is None else norm.name
            message = f"{node.op} normalizes with the statistics of the batch it is given."
            found[layer] = _training_mode(layer, message, {"op": node.op}, _remedy(exported, norm))
    stored = {node.layer for node, _ in pairs if not node.trains}
    names = {norm.name for norm in layers}
    is_known = bool(found)  # if not, written buffers count also under names that the model does not have
    for tensor in [] if in_training else sorted(exported.written()):
        layer, _, role = tensor.rpartition(".")
        is_counter = role == "num_batches_tracked" and layer in stored  # a graph in evaluation may count on
        if layer not in found and not is_counter and (layer in names or (role in STATISTICS and not is_known)):
            message = f"every run of {exported.what} writes {tensor}."
            found[layer] = _training_mode(layer, message, {"buffer": tensor}, _remedy(exported, None))
    return list(found.values())


def _uses_batch(norm: Norm | None) -> bool:
    return norm is None or (norm.spec.uses == "batch" and "N" in norm.spec.over)


def mixing() -> Finding:
    """Dependence on the rest of the batch, which no norm of the graph explains."""
    message = (
        "the output of an example depends on the others in its batch, which it does not in the model in evaluation."
    )
    return _training_mode(None, message, {}, _EVALUATE)


def _training_mode(layer: str | None, message: str, evidence: dict[str, Any], remedy: str) -> Finding:
    return Finding("NK501", "training-mode-export", "error", layer, message, evidence, remedy)


def _remedy(exported: Exported, norm: Norm | None) -> str:
    if norm is not None and norm.spec.updates == "never" and norm.spec.uses == "batch":
        return _NOTHING_STORED
    return _EVALUATE_GRAPH if exported.is_trainable else _EVALUATE


def drift(pairs: Pairs, in_training: bool) -> list[Finding]:
    """Layers whose settings differ in the graph; their mode only if the graph is to be trained as the model is."""
    found: dict[str, Finding] = {}
    for node, norm in pairs:
        if norm is None:
            continue
        changes, evidence = [], _changed_settings(node, norm)
        for name, (there, here) in evidence.items():
            changes.append(f"{name} is {there:.6g} in the exported model, {here:.6g} in the model")
        if in_training and _uses_batch(norm) and not node.trains:
            changes.append("it normalizes with stored statistics in the exported model, the batch's in the model")
            evidence["mode"] = ("stored", "batch")
        if changes:
            message = f"{'; '.join(changes)}."
            found[norm.name] = Finding("NK502", "manifest-drift", "error", norm.name, message, evidence, _EXPORT_AGAIN)
    return list(found.values())


def _changed_settings(node: ExportedNorm, norm: Norm) -> dict[str, Any]:
    """By name, the value in the graph and the value of the layer."""
    both = {"eps": (node.eps, norm.spec.eps), "momentum": (node.momentum, norm.spec.momentum)}
    known = {name: (there, here) for name, (there, here) in both.items() if there is not None and here is not None}
    return {name: pair for name, pair in known.items() if not math.isclose(*pair, rel_tol=_SAME_SETTING)}


def written_out(exported: Exported, pairs: Pairs, layers: list[Norm]) -> list[Finding]:
    """Norms that became arithmetic: in a half type, or because the graph is older than their operator."""
    halves = exported.half_norms()
    seen = {norm.name for _, norm in pairs if norm is not None}
    absent = {norm.name: exported.missing_operator(norm.spec.kind) for norm in layers if norm.name not in seen}
    missing: dict[str | None, MissingOperator] = {name: one for name, one in absent.items() if one is not None}
    return [_arithmetic(layer, halves.get(layer), missing.get(layer)) for layer in sorted({*halves, *missing}, key=str)]


def _arithmetic(layer: str | None, half: torch.dtype | None, missing: MissingOperator | None) -> Finding:
    messages, remedy = [], "Export it with its operator whole, or take its statistics in float32."
    evidence: dict[str, Any] = {}
    if missing is not None:
        operator, needs, has = missing
        messages.append(f"it is written out as arithmetic: {operator} needs opset {needs}, the model has {has}.")
        evidence |= {"opset": has, "needs": needs}
        remedy = f"Export it with opset_version={needs} or later."
    if half is not None:
        name = str(half).removeprefix("torch.")
        messages.append(f"its mean of squares is taken in {name}, {_HALF[half]}.")
        evidence["dtype"] = name
    severity: Severity = "warning" if half is torch.float16 else "info"
    return Finding("NK504", "unequal-export", severity, layer, " ".join(messages), evidence, remedy)


def unequal(exported: Exported, parity: Parity, limit: float, mode: str) -> Finding:
    """Outputs that are further apart than rounding explains."""
    return Finding(
        "NK504",
        "unequal-export",
        "error",
        None,
        f"outputs of {exported.what} differ from the model's in {mode} by {parity.max_abs:.3g}, which is "
        f"{parity.max_rel:.3g} of the largest; {limit:.3g} is allowed.",
        {"max_abs": parity.max_abs, "max_rel": parity.max_rel, "tolerance": limit},
        f"Export the model as it is now, in {mode}, with the same weights.",
    )
