"""Which parts of an image a network is shown.

Of large images: boxes (left, top, right, bottom) in their own pixels, which are then resized to the network's input, so
that cutting and scaling are one step. Of small ones in memory: squares of the network's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from normkit.errors import ArgumentError

_AREA = (0.08, 1.0)  # of the image: Szegedy 2014, section 6
_RATIO = (3 / 4, 4 / 3)  # of width to height
_TRIES = 10
DRAWS = 2 * _TRIES + 3  # random numbers that `random_crop` takes

_CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))  # shares of the room across and down
_CENTER = (0.5, 0.5)
_MARGIN = 224 / 256  # a crop of 224 out of an image whose shorter side is 256
_SHORTER_SIDES = (256, 288, 320, 352)  # Szegedy 2014, section 7


class Crop(NamedTuple):
    """A part of an image, mirrored or not."""

    box: tuple[float, float, float, float]
    mirrored: bool


def random_crop(width: int, height: int, draws: Sequence[float]) -> Crop:
    """A part of random size, shape and place, mirrored with probability 1/2. `draws` are numbers from 0 to 1."""
    across, down, side = draws[-3:]
    for area, ratio in zip(draws[0:-3:2], draws[1:-3:2], strict=True):
        pixels = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
        shape = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** ratio
        w, h = math.sqrt(pixels * shape), math.sqrt(pixels / shape)
        if w <= width and h <= height:
            return Crop(_box(across * (width - w), down * (height - h), w, h), side < 0.5)
    w, h = min(width, height * _RATIO[1]), min(height, width / _RATIO[0])  # a very long image
    return Crop(_box((width - w) / 2, (height - h) / 2, w, h), side < 0.5)


def evaluation_crops(width: int, height: int, count: int) -> list[Crop]:
    """1: the center; 10: the corners and the center, and their mirror images; 144: those of Szegedy 2014, section 7."""
    boxes = {1: _center, 10: _corners_and_center, 144: _all_over}.get(count)
    if boxes is None:
        raise ArgumentError(f"crops needs to be 1, 10 or 144; got {count}.")
    return [
        Crop(box, mirrored) for box in boxes(width, height) for mirrored in ((False, True) if count > 1 else (False,))
    ]


def square_crops(pixels: Tensor, size: int, count: int) -> Iterator[Tensor]:
    """Squares of images (N, C, H, W). 1: the center; 10: the center and the corners, and their mirror images."""
    if count not in (1, 10):
        raise ArgumentError(f"count must be 1 or 10; got {count}.")
    height, width = pixels.shape[2:]
    check_size(size, height, width)
    for across, down in (_CENTER, *_CORNERS) if count == 10 else (_CENTER,):
        left, top = int(across * (width - size)), int(down * (height - size))
        square = pixels[:, :, top : top + size, left : left + size]
        yield square
        if count == 10:
            yield square.flip(3)


def check_size(size: int, height: int, width: int) -> None:
    """Refuse squares that do not fit."""
    if not 1 <= size <= min(height, width):
        raise ArgumentError(
            f"size must be from 1 to {min(height, width)}, for squares of images of {height} x {width}; got {size}."
        )


Box = tuple[float, float, float, float]


def _box(left: float, top: float, width: float, height: float) -> Box:
    return left, top, left + width, top + height


def _center(width: int, height: int) -> Iterator[Box]:
    side = min(width, height) * _MARGIN
    yield _box((width - side) / 2, (height - side) / 2, side, side)


def _corners_and_center(width: int, height: int) -> Iterator[Box]:
    yield from _five(_box(0, 0, width, height), min(width, height) * _MARGIN)


def _five(within: Box, side: float) -> Iterator[Box]:
    """Squares in the corners of a box and in its center."""
    left, top, right, bottom = within
    for x, y in (*_CORNERS, _CENTER):
        yield _box(left + x * (right - left - side), top + y * (bottom - top - side), side, side)


def _all_over(width: int, height: int) -> Iterator[Box]:
    """At four scales, of the two ends and the middle of an image: corners, center, and all of it."""
    short = min(width, height)
    for side in _SHORTER_SIDES:
        for place in (0.0, 0.5, 1.0):
            square = _box(place * (width - short), place * (height - short), short, short)
            yield from _five(square, short * 224 / side)
            yield square
