"""Why stored statistics are not those of the data."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from normkit.doctor.evidence.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics

CauseName = Literal["few-steps", "pruning", "averaged-weights", "input-scaled", "shift", "other-statistics"]

_INITIAL = 0.05  # the part of the initial values that may be left in a moving average
_PRUNED = 0.2  # the part of weights that are exactly zero
_OFF = 0.35  # standard deviations by which a layer counts as off
_MOST = 0.4  # the part of the layers that are off when weights are others than those the statistics were taken with
_SCALED = 0.2  # by how much channels may disagree about the factor, relative to it


class Cause(NamedTuple):
    """The likely cause, by a name for programs and in words."""

    name: CauseName
    words: str


def cause_of(evidence: Evidence, known: LayerStatistics, is_shared: bool = False) -> Cause:
    """The likely cause for one layer, in view of all others; `is_shared` if many layers have a part in the gap."""
    common = _few_steps(known) or _pruned(evidence) or _averaged(evidence, is_shared)
    return common or _shifted(evidence, known) or _OTHERS


def _few_steps(known: LayerStatistics) -> Cause | None:
    left = known.initial_part
    if not known.tracked or (left < _INITIAL and not known.is_still_arriving):
        return None
    momentum = known.norm.spec.momentum
    words = f"{known.tracked} updates with momentum {momentum:g} leave {left:.2g} of the initial values in it"
    return Cause("few-steps", f"too few steps: {words}")


def _pruned(evidence: Evidence) -> Cause | None:
    weights: list[Tensor] = [p for p in evidence.model.parameters() if p.dim() > 1]
    zeros = sum((p == 0).sum().item() for p in _masked(evidence, weights))
    total = sum(p.numel() for p in weights)
    if not total or zeros < _PRUNED * total:
        return None
    words = f"pruning: {zeros / total:.0%} of the weights are exactly zero, and the statistics are older than that"
    return Cause("pruning", words)


def _masked(evidence: Evidence, weights: list[Tensor]) -> list[Tensor]:
    """The weights as layers use them: torch's pruning keeps the originals beside masks."""
    masks = [b for name, b in evidence.model.named_buffers() if name.endswith("_mask") and b.dim() > 1]
    return [*weights, *masks]


def _averaged(evidence: Evidence, is_shared: bool) -> Cause | None:
    distances = [known.distance for _, known in evidence.stored if known.distance is not None]
    off = sum(distance > _OFF for distance in distances)
    if not is_averaging(evidence) and not is_shared and (off < 2 or off < _MOST * len(distances)):
        return None
    how_many = "many layers are a little off" if is_shared else f"{off} of {len(distances)} layers are off"
    words = (
        f"{how_many}: the weights are others than those that the statistics were taken "
        "with, as of EMA or SWA (averaged weights, with buffers that were not averaged), quantization or fine-tuning"
    )
    return Cause("averaged-weights", words)


def is_averaging(evidence: Evidence) -> bool:
    """Whether the model is torch's AveragedModel, or has one in it."""
    return any(name.rpartition(".")[2] == "n_averaged" for name, _ in evidence.model.named_buffers())


def _shifted(evidence: Evidence, known: LayerStatistics) -> Cause | None:
    first = next((one for _, one in evidence.stored), None)
    if first is not known or known.stored is None or known.data is None:
        return None
    ratio = ((known.data.var / known.stored.var.clamp(min=1e-30)).sqrt())[known.data.var > 0]
    factor = ratio.median().item()
    if (ratio / factor - 1).square().mean().sqrt() < _SCALED and abs(factor - 1) > _SCALED:
        words = f"shift: these batches are about {factor:.2g} times as large as what the statistics were taken of"
        return Cause("input-scaled", f"{words}; look at how the input is scaled")
    words = "shift: the input of these batches is distributed otherwise than what the statistics were taken of"
    return Cause("shift", words)


_OTHERS = Cause(
    "other-statistics", "this layer's statistics were taken of other data or with other weights, or were overwritten"
)
