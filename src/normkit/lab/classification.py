"""Training a classifier on small images: what several experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.lab import data, models
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

    def vgg(self, norm: models.Norm | None, settings: Mapping[str, Any]) -> nn.Sequential:
        """A VGG net for these images, of the `depth` and `width` of the settings; its weights are yet to be drawn."""
        return models.vgg(
            norm,
            in_channels=self.channels,
            classes=self.classes,
            depth=settings["depth"],
            width=settings["width"],
            init=None,
        )

    def small_resnet(self, norm: models.Norm, seed: int) -> models.ResNet:
        """Eight layers in residual blocks, on maps of half the images' size; weights depend on the seed alone."""
        model = models.resnet(
            8, norm, in_channels=self.channels, classes=self.classes, width=8, stem_stride=2, init=None
        )
        models.initialize_(model, seed=seed)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def falling_training(self, trial: Trial, model: nn.Module, measure_at: Callable[[int], bool]) -> Training:
        """Train by SGD with the `momentum` of the trial's settings, at a rate that falls linearly to 0."""
        settings = trial.arm.settings
        rate, steps = settings["rate"], settings["steps"]
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=settings["momentum"], fused=True)
        return self.training(trial, model, optimizer, measure_at, lambda step: rate * (1 - step / steps))

    def plain_training(self, trial: Trial, model: nn.Module, measure_at: Callable[[int], bool]) -> Training:
        """Train as Santurkar et al. 2018: Glorot's weights, the same for all arms with a seed, and SGD at one rate."""
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.initialize_(model, "glorot", seed=trial.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.arm.settings["rate"])
        return self.training(trial, model, optimizer, measure_at)
