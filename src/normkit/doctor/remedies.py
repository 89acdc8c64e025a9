"""What is safe to do about findings.

It leaves evaluation as it is or can be measured, keeps the keys of the state_dict, and can be undone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from normkit.errors import NormkitWarning
from normkit.finding import Finding
from normkit.named_layers import named_layers
from normkit.surgery.norms import norms
from normkit.surgery.replace.freeze import freeze
from normkit.surgery.result import Change
from normkit.surgery.statistics.recalibrate import recalibrate

if TYPE_CHECKING:
    from normkit.doctor.diagnosis import Patient

_STATISTICS = ("NK101", "NK102", "NK103", "NK104")  # a momentum of 0.9 leaves the statistics of the last batch


class Remedy(NamedTuple):
    """Something safe to do about findings of some codes.

    Attributes:
        codes: which.
        what: what it does.
        apply: changes a model in place for these findings, and says what it changed.
        least_gain: the part of all that can be gained that it must bring in order to be kept.
    """

    codes: tuple[str, ...]
    what: str
    apply: Callable[[nn.Module, Sequence[Finding], Patient], Sequence[Change]]
    least_gain: float = 0.0


def _named_recalibrated(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """The layers found alone: all others keep what a whole training has averaged."""
    names = {finding.layer for finding in found}
    others = [norm.layer for norm in norms(model) if norm.name not in names]
    kept = [(buffer, buffer.clone()) for layer in others for buffer in layer.buffers(recurse=False)]
    changes = _recalibrated(model, patient)
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return [change for change in changes if change.layer in names]


def _all_recalibrated(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """All layers, where the others are off as well: nothing if there are no others."""
    names = {finding.layer for finding in found}
    changes = _recalibrated(model, patient)
    return changes if any(change.layer not in names for change in changes) else []


def _recalibrated(model: nn.Module, patient: Patient) -> Sequence[Change]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NormkitWarning)  # of layers that no batch reaches: nobody asked for these
        return recalibrate(model, patient.batches, patient.forward, inplace=True).changed


def _momentum_turned(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """A momentum of 0.9, which elsewhere weights the old value, as the 0.1 that is meant."""
    changes = []
    for name, layer in _layers_of(model, found):
        momentum: Any = getattr(layer, "momentum", None)
        if isinstance(momentum, float) and 0.5 < momentum < 1:
            turned = float(f"{1 - momentum:.6g}")
            vars(layer)["momentum"] = turned
            changes.append(Change(name, f"momentum {momentum:g} to {turned:g}", "it weights the new value"))
    return changes


def _freeze_completed(model: nn.Module, found: Sequence[Finding], patient: Patient) -> Sequence[Change]:
    """A frozen norm that trains is frozen whole; one that learns, in evaluation, trains as the model does."""
    changes: list[Change] = []
    for name, layer in _layers_of(model, found):
        if layer.training:
            changes += [change._replace(layer=name) for change in freeze(layer, inplace=True).changed]
        elif model.training and any(parameter.requires_grad for parameter in layer.parameters()):
            layer.train()
            changes.append(Change(name, "put into training mode", "as the model is: its gamma and beta learn"))
    return changes


def _layers_of(model: nn.Module, found: Sequence[Finding]) -> Iterator[tuple[str, nn.Module]]:
    layers = dict(named_layers(model))
    for name in dict.fromkeys(finding.layer for finding in found):
        if name is not None and name in layers:
            yield name, layers[name]


# In this order: a freeze keeps the statistics that were put right before it.
REMEDIES = (
    Remedy(_STATISTICS, "statistics of the layers named taken from the batches again", _named_recalibrated),
    Remedy(_STATISTICS, "statistics of all layers taken from the batches again", _all_recalibrated, least_gain=0.05),
    Remedy(("NK104",), "momentum turned round", _momentum_turned),
    Remedy(("NK202", "NK203"), "freeze completed", _freeze_completed),
)
