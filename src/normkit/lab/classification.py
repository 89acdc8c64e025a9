"""Training a classifier on small images: what several experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normkit.lab import data
from normkit.lab.data.transforms import standardized
from normkit.lab.data.types import DataSet
from normkit.lab.experiment import Training, Trial
from normkit.lab.measures import accuracy, chance_level


class Classification:
    """A set of small images, standardized: batches to train on, and the accuracy on the test images."""

    def __init__(self, found: DataSet, test_images: int | None = None) -> None:
        self._train, self._prepare = found.train, standardized(found.train.pixels)
        self._images = self._prepare(found.test.pixels[:test_images])
        self._labels = found.test.labels[:test_images]
        self.channels, self.classes = found.train.pixels.shape[1], len(found.classes)

    def batches(self, size: int, seed: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from step `start` on, without end."""
        return data.batches(self._train, size, seed, start, lambda pixels, _: self._prepare(pixels))

    def accuracy(self, model: nn.Module, batch: int = 1000) -> float:
        """The share of test images that a model classifies correctly."""
        return accuracy(model, self._images, self._labels, batch)

    def training(
        self,
        trial: Trial,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        measure_at: Callable[[int], bool],
        rate: Callable[[int], float] | None = None,
    ) -> Training:
        """Train with the `batch` and `steps` of the trial's settings, and measure the accuracy."""
        settings = trial.arm.settings
        return Training(
            model,
            optimizer,
            lambda start: self.batches(settings["batch"], trial.seed, start),
            settings["steps"],
            measure_at,
            lambda model: {"accuracy": self.accuracy(model)},
            rate=rate,
            chance=chance_level(self.classes),
        )
