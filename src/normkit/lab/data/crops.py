"""Which parts of an image are looked at, as boxes (left, top, right, bottom) in its own pixels.

Every box is then resized to the size of the network's input, so that cutting and scaling are one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from normkit.errors import ArgumentError

_AREA = (0.08, 1.0)  # of the image: Szegedy 2014, section 6
_RATIO = (3 / 4, 4 / 3)  # of width to height
_TRIES = 10
DRAWS = 2 * _TRIES + 3  # random numbers that `random_crop` takes

_MARGIN = 224 / 256  # a crop of 224 out of an image whose shorter side is 256
_SHORTER_SIDES = (256, 288, 320, 352)  # Szegedy 2014, section 7


class Crop(NamedTuple):
    """A part of an image, perhaps in the mirror."""

    box: tuple[float, float, float, float]
    mirrored: bool


def random_crop(width: int, height: int, draws: Sequence[float]) -> Crop:
    """A part of random size, shape and place; half of them mirrored. `draws` are numbers from 0 to 1."""
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
    """1: the centre; 10: the corners and the centre, and their mirror images; 144: those of Szegedy 2014, section 7."""
    boxes = {1: _centre, 10: _corners_and_centre, 144: _all_over}.get(count)
    if boxes is None:
        raise ArgumentError(f"crops needs to be 1, 10 or 144; got {count}.")
    return [
        Crop(box, mirrored) for box in boxes(width, height) for mirrored in ((False, True) if count > 1 else (False,))
    ]


Box = tuple[float, float, float, float]


def _box(left: float, top: float, width: float, height: float) -> Box:
    return left, top, left + width, top + height


def _centre(width: int, height: int) -> Iterator[Box]:
    side = min(width, height) * _MARGIN
    yield _box((width - side) / 2, (height - side) / 2, side, side)


def _corners_and_centre(width: int, height: int) -> Iterator[Box]:
    yield from _five(_box(0, 0, width, height), min(width, height) * _MARGIN)


def _five(within: Box, side: float) -> Iterator[Box]:
    """The corners of a box and its centre."""
    left, top, right, bottom = within
    for x, y in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.5)):
        yield _box(left + x * (right - left - side), top + y * (bottom - top - side), side, side)


def _all_over(width: int, height: int) -> Iterator[Box]:
    """At four scales, of the two ends and the middle of an image: corners, centre, and all of it."""
    short = min(width, height)
    for side in _SHORTER_SIDES:
        for place in (0.0, 0.5, 1.0):
            square = _box(place * (width - short), place * (height - short), short, short)
            yield from _five(square, short * 224 / side)
            yield square
