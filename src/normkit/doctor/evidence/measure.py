"""What one number says how well a model does on a batch: its loss or, without one, the distance of its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from normkit.batches import target_in
from normkit.errors import ArgumentError
from normkit.surgery.fold.dataflow import outputs_of

LossFunction = Callable[[Any, Any], Any]

# A gap counts if recalibrated outputs are nearer to those with the statistics of batches, by this many standard
# deviations of these; a gap of the loss if it is also this part of it, which alone says little of a loss near 0.
MATERIAL_DISTANCE, MATERIAL_LOSS = 0.2, 0.25


class Measure(Protocol):
    """One number for the output on a batch; the lower, the better."""

    name: Literal["loss", "distance"]

    def __call__(self, index: int, output: Any) -> float:
        """Judge the output on the batch of this number."""


class Loss:
    """The user's loss."""

    name: Literal["loss", "distance"] = "loss"

    def __init__(self, loss: LossFunction, model: nn.Module, batches: Sequence[Any]) -> None:
        self._loss, self._model, self._batches = loss, model, batches

    def __call__(self, index: int, output: Any) -> float:
        """The loss of an output on the batch of this number."""
        return float(self.tensor(index, output))

    def tensor(self, index: int, output: Any) -> Tensor:
        """The same, with its gradient."""
        value = self._loss(output, target_in(self._model, self._batches[index]))
        value = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if value.numel() != 1:
            raise ArgumentError(
                f"loss must return one number; got a tensor of shape {tuple(value.shape)}. Return its mean()."
            )
        return value.reshape(())


class Distance:
    """The distance of outputs from others on the same batches, in the standard deviations of those."""

    name: Literal["loss", "distance"] = "distance"

    def __init__(self, reference: Mapping[int, list[Tensor]], power: int = 1) -> None:
        self._reference, self._power = reference, power

    def __call__(self, index: int, output: Any) -> float:
        """The root mean square distance, to the given power; infinite where NaN or shapes differ."""
        pairs = list(zip(kept_outputs(output), self._reference[index], strict=False))
        return max((_distance(new, old) for new, old in pairs), default=0.0) ** self._power


def kept_outputs(output: Any) -> list[Tensor]:
    """Copies of the floating-point tensors of an output."""
    return [tensor.detach().clone() for tensor in outputs_of(output) if tensor.is_floating_point()]


def _distance(new: Tensor, old: Tensor) -> float:
    if new.shape != old.shape:
        return math.inf
    if old.numel() == 0:
        return 0.0
    new, old = new.double(), old.double()
    both = new.isfinite() & old.isfinite()
    if not torch.equal(new.isfinite(), old.isfinite()):
        return math.inf
    gap = torch.where(both, new - old, 0.0).square().mean().sqrt().item()
    centered = old - (old.mean(0, keepdim=True) if old.dim() and len(old) > 1 else 0.0)
    spread = torch.where(both, centered, 0.0).square().mean().sqrt().item()
    if gap == 0:
        return 0.0
    return gap / spread if spread else math.inf


@dataclass(frozen=True)
class Gap:
    """The measure of one model in three modes, as the mean over the batches.

    Attributes:
        measure: "loss", or "distance" of the outputs from those in training mode.
        training: norms use the statistics of each batch, everything else runs as in evaluation.
        evaluation: norms use what they store.
        recalibrated: norms use the statistics of all batches together.
        moved: how much nearer the outputs are to those of training once recalibrated, as a distance.
    """

    measure: Literal["loss", "distance"]
    training: float
    evaluation: float
    recalibrated: float
    moved: float

    @property
    def size(self) -> float:
        """How much of the measure new statistics recover."""
        return self.evaluation - self.recalibrated

    @property
    def is_material(self) -> bool:
        """Whether it is more than the noise of statistics explains."""
        if not math.isfinite(self.evaluation):
            return math.isfinite(self.recalibrated)
        if self.measure == "distance":
            return self.moved > MATERIAL_DISTANCE and self.evaluation > 2 * self.recalibrated
        return self.moved > MATERIAL_DISTANCE and self.size > MATERIAL_LOSS * self.scale

    @property
    def scale(self) -> float:
        """What a gap of the loss is compared with."""
        return max(abs(self.recalibrated), abs(self.training))

    def plain(self) -> dict[str, Any]:
        """The gap as reports have it."""
        return {
            "measure": self.measure,
            "training": self.training,
            "evaluation": self.evaluation,
            "recalibrated": self.recalibrated,
        }
