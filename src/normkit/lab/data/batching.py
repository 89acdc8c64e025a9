"""Endless batches whose every number is a function of the seed and the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normkit.errors import ArgumentError
from normkit.lab.data.randomness import generator
from normkit.lab.data.types import Images

Transform = Callable[[Tensor, torch.Generator], Tensor]


def batches(
    images: Images, size: int, seed: int, start: int = 0, transform: Transform | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end, each epoch in an order of its own; the last images, too few for a batch, are left out.

    After `start` steps have been taken, what comes is what would have come. `transform` gets the stored pixels and a
    generator of the step's own; without one, pixels become float32 from 0 to 1.
    """
    chosen = batch_indices(len(images.labels), size, seed, start)
    return _batches(images, chosen, seed, start, transform or to_unit_range)


def batch_indices(count: int, size: int, seed: int, start: int) -> Iterator[Tensor]:
    """Which images are in the batches from step `start` on."""
    if not 1 <= size <= count:
        raise ArgumentError(f"A batch needs from 1 to {count} images, as many as there are; got {size}.")
    _check_start(start)
    return _indices(count, size, seed, start)


def windows(text: Tensor, length: int, size: int, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end: (size, length) characters from random places of a text, and those that follow each.

    After `start` steps have been taken, what comes is what would have come.
    """
    if not 1 <= length < len(text) or size < 1:
        raise ArgumentError(
            f"A window needs from 1 to {len(text) - 1} characters of this text, and a batch 1 window or more; "
            f"got {length} and {size}."
        )
    _check_start(start)
    return _windows(text, length, size, seed, start)


def to_unit_range(pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Bytes as float32 from 0 to 1."""
    return pixels.float().div_(255.0)


def _check_start(start: int) -> None:
    if start < 0:
        raise ArgumentError(f"start needs a number of steps that were taken, from 0 on; got {start}.")


def _batches(
    images: Images, chosen: Iterator[Tensor], seed: int, start: int, transform: Transform
) -> Iterator[tuple[Tensor, Tensor]]:
    for step, index in enumerate(chosen, start):
        pixels = images.pixels.index_select(0, index)  # faster than indexing
        yield transform(pixels, generator("transform", seed, step)), images.labels[index]


def _indices(count: int, size: int, seed: int, start: int) -> Iterator[Tensor]:
    epoch, skip = divmod(start, count // size)
    while True:
        order = torch.randperm(count, generator=generator("order", seed, epoch))
        yield from order.split(size)[skip : count // size]
        epoch, skip = epoch + 1, 0


def _windows(text: Tensor, length: int, size: int, seed: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    along = torch.arange(length + 1)
    for step in itertools.count(start):
        first = torch.randint(len(text) - length, (size, 1), generator=generator("windows", seed, step))
        found = text[first + along]
        yield found[:, :-1], found[:, 1:]
