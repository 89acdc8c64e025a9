"""Images as networks take them: standardized, cut and mirrored. The draws are those of the generator that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normkit.errors import ArgumentError
from normkit.lab.data.batching import Transform

Prepare = Callable[[Tensor], Tensor]  # stored pixels, uint8 (N, C, H, W), to a network's input


def standardized(training: Tensor) -> Prepare:
    """Return what gives pixels the training images' mean 0 and variance 1, channel by channel, in channels_last."""
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


def crops(pixels: Tensor, size: int, count: int) -> Iterator[Tensor]:
    """The squares of this size that a network is asked about: 1: the centre; 10: corners and centre, also mirrored."""
    if count not in (1, 10):
        raise ArgumentError(f"count must be 1 or 10; got {count}.")
    height, width = pixels.shape[2:]
    check_size(size, height, width)
    down, across = height - size, width - size
    places = [(down // 2, across // 2)]
    if count == 10:
        places += [(top, left) for top in (0, down) for left in (0, across)]
    for top, left in places:
        square = pixels[:, :, top : top + size, left : left + size]
        yield square
        if count == 10:
            yield square.flip(3)


def check_size(size: int, height: int, width: int) -> None:
    """Refuse squares that do not fit."""
    if not 1 <= size <= min(height, width):
        raise ArgumentError(f"Squares of {size} pixels cannot be cut from images of {height} x {width}.")
