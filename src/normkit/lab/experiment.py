"""An experiment: a claim, arms that differ in what the claim is about, a measure and a verdict. One file each."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normkit.instruments.loss import Closure
from normkit.instruments.probe import Probe
from normkit.lab.data import DataKind, Share
from normkit.lab.findings import Findings
from normkit.lab.record import Run

Scale = Literal["quick", "desk", "full"]
SCALES: tuple[Scale, ...] = ("quick", "desk", "full")


class Arm(NamedTuple):
    """One of the things compared: a name, and settings that say all that is particular to it, in JSON's types."""

    name: str
    settings: Mapping[str, Any]


class Trial(NamedTuple):
    """All that a record depends on: the same trial gives the same record."""

    experiment: str
    arm: Arm
    seed: int
    scale: Scale
    data: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.experiment}.{self.arm.name}.{self.seed}"


@dataclass
class Training:
    """A model in training: how it takes a step, what is measured and when."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]  # from this step on
    steps: int
    measure_at: Callable[[int], bool]  # after this number of steps
    measure: Callable[[nn.Module], dict[str, Any]]  # in evaluation mode and without gradients
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    rate: Callable[[int], float] | None = None  # the learning rate before this step; None: as the optimizer has it
    chance: float = 0.0  # an accuracy not above it at the end is a divergence
    probes: Callable[[Closure], Sequence[Probe]] | None = None  # of the loss of the present batch; see `Observation`
    update: Callable[[Tensor, Tensor], float] | None = None  # instead of a step down `loss`, and returns its own
    # As `batches`, of one rank's share of each; None: a rank makes whole batches, which are cheap, and cuts them.
    shares: Callable[[int, Share], Iterator[tuple[Tensor, Tensor]]] | None = None


class Experiment(abc.ABC):
    """What `normkit lab run` runs."""

    name: ClassVar[str]
    claim: ClassVar[str]
    source: ClassVar[str]
    data: ClassVar[str] = "fashion-mini"  # unless another set is chosen
    takes: ClassVar[DataKind] = "small images"  # what `data` may be; "images" are of any size, read batch by batch
    seeds: ClassVar[Mapping[Scale, int]] = {"quick": 1, "desk": 3, "full": 5}

    @abc.abstractmethod
    def arms(self, scale: Scale) -> Sequence[Arm]:
        """What is compared at this scale."""

    @abc.abstractmethod
    def training(self, trial: Trial) -> Training:
        """Set a trial up; the global random state has been seeded with the trial's seed."""

    @abc.abstractmethod
    def findings(self, run: Run) -> Findings:
        """Say what the records of a run show, finished or not."""
