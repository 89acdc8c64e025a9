"""Images as networks take them: standardized, cut and mirrored, from -1 to 1, or binary.

Random ones draw from a given generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normkit.lab.data.batching import Transform
from normkit.lab.data.crops import check_size

Prepare = Callable[[Tensor], Tensor]  # stored pixels, uint8 (N, C, H, W), to a network's input


def standardized(training: Tensor) -> Prepare:
    """Return a map to channels_last images, which gives the training images mean 0 and variance 1 in each channel."""
    pixels = training.flatten(2).float()
    mean, deviation = pixels.mean((0, 2)).view(-1, 1, 1), pixels.std((0, 2)).view(-1, 1, 1)
    return lambda pixels: pixels.float().sub_(mean).div_(deviation).contiguous(memory_format=torch.channels_last)


def cut_and_mirrored(prepare: Prepare, size: int) -> Transform:
    """Return a transform for training: of each image a square of this size at a random place, half of them mirrored."""

    def transform(pixels: Tensor, generator: torch.Generator) -> Tensor:
        count, _, height, width = pixels.shape
        check_size(size, height, width)
        top = torch.randint(0, height - size + 1, (count, 1), generator=generator)
        left = torch.randint(0, width - size + 1, (count, 1), generator=generator)
        mirrored = torch.rand((count, 1), generator=generator) < 0.5
        across = torch.arange(size)
        rows, columns = top + across, left + torch.where(mirrored, across.flip(0), across)
        image, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(pixels.shape[1]).view(-1, 1, 1)
        return prepare(pixels[image, channel, rows[:, None, :, None], columns[:, None, None, :]])

    return transform


def to_signed_range(pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Bytes as float32 from -1 to 1."""
    return pixels.float().div_(127.5).sub_(1)


def from_signed_range(images: Tensor) -> Tensor:
    """Images from -1 to 1 as the nearest bytes."""
    return images.add(1).mul_(127.5).round_().to(torch.uint8)


def binary(pixels: Tensor) -> Tensor:
    """Images with every pixel on or off, by a threshold: for testing."""
    return (pixels > 127).float().flatten(1)


def drawn_binary(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images with every pixel on or off, each on with its brightness as the probability: for training."""
    return torch.bernoulli(pixels.float() / 255, generator=generator).flatten(1)
