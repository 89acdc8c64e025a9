"""A folder of images by class, in ImageNet's layout: train/CLASS/*.jpg, and val/CLASS/*.jpg or test/CLASS/*.jpg."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.environment import count_cores
from normkit.errors import ArgumentError
from normkit.lab.data.batching import batch_indices, to_unit_range
from normkit.lab.data.crops import DRAWS, evaluation_crops, random_crop
from normkit.lab.data.image_check import check_images
from normkit.lab.data.image_files import Header, read_crops, read_whole
from normkit.lab.data.prefetch import prefetch
from normkit.lab.data.randomness import generator
from normkit.lab.data.share import WHOLE, Share
from normkit.lab.data.types import DataError, DataSet, Images

_IMAGES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
_SMALL = 64  # pixels a side: such a set is read into memory
_MEMORY = 2 << 30  # bytes that such a set may take


class Listing(NamedTuple):
    """Files with their labels."""

    files: list[Path]
    labels: Tensor  # int64, (N,)


class FolderSet:
    """Images of any size, read from the disk batch by batch by as many threads as there are cores.

    All of them are looked at once at the beginning: a file that is broken or cut off is named then, and not when
    training comes to it.
    """

    def __init__(self, path: str | Path, pixels: int = 224, workers: int | None = None) -> None:
        if pixels < 1 or (workers is not None and workers < 1):
            raise ArgumentError(f"pixels and workers need to be 1 or more; got {pixels} and {workers}.")
        self.path = Path(path)
        self.name = str(path)
        self.pixels = pixels
        self.workers = workers or count_cores()
        self.classes, self.train, self.test = list_folder(self.path)
        self.shared_header = _shared(check_images([*self.train.files, *self.test.files], self.workers))

    def train_batches(
        self, size: int, seed: int, start: int = 0, share: Share = WHOLE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random parts of the training images, without end, as float32 (N, 3, H, W) from 0 to 1.

        As with `batches`, every number is a function of the seed and the step, whatever the threads do, and however
        many ranks share the batches: only a rank's own images are read.
        """
        return self._train(batch_indices(len(self.train.files), size, seed, start), seed, start, share)

    def test_batches(self, size: int, crops: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """All test images, once and in order: (N, 3, H, W), or (N, crops, 3, H, W) where crops is 10 or 144."""
        if size < 1:
            raise ArgumentError(f"A batch needs 1 or more images; got {size}.")
        evaluation_crops(1, 1, crops)  # an error comes now, and not with the first batch
        return self._test(size, crops)

    def _train(self, chosen: Iterator[Tensor], seed: int, start: int, share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        labels: list[Tensor] = []

        def jobs() -> Iterator[list[tuple[Path, list[float]]]]:
            for step, index in enumerate(chosen, start):
                draws = torch.rand(len(index), DRAWS, generator=generator("crops", seed, step), dtype=torch.float64)
                index, draws = share.of(index), share.of(draws)
                labels.append(self.train.labels[index])
                yield [(self.train.files[i], own) for i, own in zip(index.tolist(), draws.tolist(), strict=True)]

        for parts in prefetch(self._random_part, jobs(), self.workers):
            none = torch.empty(0, 3, self.pixels, self.pixels, dtype=torch.uint8)
            yield to_unit_range(torch.cat(parts) if parts else none), labels.pop(0)

    def _random_part(self, job: tuple[Path, list[float]]) -> Tensor:
        path, draws = job
        return read_crops(path, lambda width, height: [random_crop(width, height, draws)], self.pixels)

    def _test(self, size: int, crops: int) -> Iterator[tuple[Tensor, Tensor]]:
        files = [self.test.files[at : at + size] for at in range(0, len(self.test.files), size)]
        read = partial(read_crops, choose=partial(evaluation_crops, count=crops), pixels=self.pixels)
        for parts, labels in zip(prefetch(read, files, self.workers), self.test.labels.split(size), strict=True):
            found = torch.stack(parts)
            yield to_unit_range(found if crops > 1 else found[:, 0]), labels


def open_folder(path: Path) -> DataSet | FolderSet:
    """A set in memory where the images are small and of one size; else one that reads them as they are needed."""
    found = FolderSet(path)
    mode = _mode_of_small(found)
    if mode is None:
        return found
    train, test = (_read(listing, mode) for listing in (found.train, found.test))
    return DataSet(found.name, found.classes, train, test)


def _shared(headers: Sequence[Header]) -> Header | None:
    """The size that all images have, and a mode that holds them all; None where sizes differ."""
    if len({size for size, _ in headers}) != 1:
        return None
    return headers[0][0], "L" if all(mode in ("1", "L") for _, mode in headers) else "RGB"


def _mode_of_small(found: FolderSet) -> str | None:
    """The mode to read small images of one size in; None where they are not, or take too much memory."""
    count = len(found.train.files) + len(found.test.files)
    if found.shared_header is None or count * 3 * _SMALL**2 > _MEMORY:
        return None
    size, mode = found.shared_header
    return mode if max(size) <= _SMALL else None


def _read(listing: Listing, mode: str) -> Images:
    read = partial(read_whole, mode=mode)
    (pixels,) = prefetch(read, [listing.files], count_cores())
    return Images(torch.stack(pixels), listing.labels)


# ---- what is where


def list_folder(path: Path) -> tuple[tuple[str, ...], Listing, Listing]:
    """Classes, training files and test files."""
    train = _by_class(path / "train", path)
    test_folder = next((path / name for name in ("val", "test") if (path / name).is_dir()), path / "val")
    test = _by_class(test_folder, path)
    if odd := train.keys() ^ test.keys():
        raise DataError(
            f"{path} needs the same classes in train and {test_folder.name}; "
            f"only one of them has {', '.join(sorted(odd)[:5])}. Add what is missing, or remove the rest."
        )
    if len(train) < 2:
        raise DataError(f"{path / 'train'} needs two classes or more, a folder each; got only {', '.join(train)}.")
    return tuple(train), _listing(train), _listing(test)


def _by_class(folder: Path, root: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise DataError(
            f"A folder of images needs train/CLASS/*.jpg, and val/CLASS/*.jpg or test/CLASS/*.jpg; "
            f"{root} {'has no ' + folder.name if root.is_dir() else 'is not a folder'}."
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder} needs a folder of images for each class; it has no folders.")
    return {name: _images_in(folder / name) for name in names}


def _images_in(folder: Path) -> list[Path]:
    found = sorted(
        file for file in folder.rglob("*") if file.suffix.lower() in _IMAGES and not file.name.startswith(".")
    )
    if not found:
        raise DataError(f"{folder} needs images ({', '.join(sorted(_IMAGES))}); it has none. Add some, or remove it.")
    return found


def _listing(by_class: dict[str, list[Path]]) -> Listing:
    counts = torch.tensor([len(files) for files in by_class.values()])
    labels = torch.arange(len(counts)).repeat_interleave(counts)
    return Listing([file for files in by_class.values() for file in files], labels)
