"""What trials measure of a trained model."""

from __future__ import annotations

from torch import Tensor, nn


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """The share of images that a model classifies correctly."""
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return right / len(labels)


def chance_level(classes: int) -> float:
    """The accuracy that guessing does not exceed, with some room for luck."""
    return 1.2 / classes
