"""Parts of image files as bytes. Pillow decodes without holding Python's lock, so threads read side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.lab.data.crops import Crop
from normkit.lab.data.pillow import pillow
from normkit.lab.data.types import DataError

Choose = Callable[[int, int], Sequence[Crop]]  # from width and height
Header = tuple[tuple[int, int], str]  # width and height, and Pillow's mode

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


def read_crops(path: Path, choose: Choose, pixels: int) -> Tensor:
    """Parts of an image, each `pixels` wide and high: uint8, (crops, 3, H, W)."""
    image = pillow().Image
    with opened(path) as file:
        width, height = file.size
        crops = choose(width, height)
        scale = min(min(right - left, bottom - top) for (left, top, right, bottom), _ in crops) / pixels
        # JPEG can be decoded at a half, a quarter or an eighth, which is faster; never smaller than it is needed.
        file.draft("RGB", (int(width / scale), int(height / scale)))
        whole = file.convert("RGB")
    shrunk = whole.width / width, whole.height / height
    parts = []
    for (left, top, right, bottom), mirrored in crops:
        box = (left * shrunk[0], top * shrunk[1], right * shrunk[0], bottom * shrunk[1])
        box = (*box[:2], min(box[2], whole.width), min(box[3], whole.height))  # what rounding adds is outside
        part = whole.resize((pixels, pixels), image.Resampling.BILINEAR, box=box)
        parts.append(as_tensor(part.transpose(image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part))
    return torch.stack(parts)


def read_whole(path: Path, mode: str) -> Tensor:
    """All of an image: uint8, (C, H, W)."""
    with opened(path) as file:
        return as_tensor(file.convert(mode))


def check_image(path: Path) -> Header:
    """Size and mode of an image; an error if it cannot be read or is cut off.

    A file that ends as its format does is not cut off; others are decoded to find out.
    """
    with opened(path) as file:
        header = file.size, file.mode
        if not _ends_well(path, file.format):
            file.load()
        return header


def _ends_well(path: Path, format: str | None) -> bool:
    end = _ENDS.get(format or "")
    if end is None:
        return False
    with path.open("rb") as file:
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An image of 8 bits per colour; what goes wrong inside is the file's fault, and named after it."""
    image = pillow().Image
    try:
        with image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                raise DataError(f"{path} needs 8 bits per colour; it has mode {file.mode!r}. Convert it, or remove it.")
            yield file
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever the damage leads them to
        raise DataError(f"{path} is not an image that can be read: {error}. Replace it, or remove it.") from error


def as_tensor(image: Any) -> Tensor:
    """Pillow's pixels as (C, H, W)."""
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
