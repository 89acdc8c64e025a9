"""Pixels on their way into a network: standardized, cut and mirrored, from -1 to 1 and back."""

import pytest
import torch

from normkit.errors import ArgumentError
from normkit.lab.data.crops import square_crops
from normkit.lab.data.transforms import cut_and_mirrored, from_signed_range, standardized, to_signed_range


def pixels_of(count, channels=3, height=9, width=11, seed=0):
    shape = (count, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_training_images_become_standard_in_each_channel():
    pixels = pixels_of(50) // torch.tensor([1, 2, 4], dtype=torch.uint8).view(3, 1, 1)
    x = standardized(pixels)(pixels)
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)
    before = pixels.clone()
    standardized(pixels)(pixels[:2])
    assert torch.equal(pixels, before)


def test_bytes_lie_evenly_from_minus_one_to_one_and_come_back():
    pixels = torch.arange(256, dtype=torch.uint8)
    images = to_signed_range(pixels)
    assert (float(images[0]), float(images[-1])) == (-1.0, 1.0)
    torch.testing.assert_close(images.diff(), torch.full((255,), 2 / 255), atol=1e-6, rtol=0)
    before = images.clone()
    assert torch.equal(from_signed_range(images), pixels)
    assert torch.equal(images, before)


def test_every_cut_is_part_of_its_image_and_all_places_and_both_sides_come():
    image = torch.arange(5 * 6, dtype=torch.uint8).view(1, 1, 5, 6)
    pixels = image.expand(400, 1, 5, 6)
    cut = cut_and_mirrored(lambda pixels: pixels, 4)(pixels, torch.Generator().manual_seed(1))
    wanted = {
        tuple(part.flatten().tolist())
        for top in range(2)
        for left in range(3)
        for square in [image[0, 0, top : top + 4, left : left + 4]]
        for part in (square, square.flip(1))
    }
    assert {tuple(part.flatten().tolist()) for part in cut} == wanted


def test_channels_of_an_image_are_cut_alike():
    pixels = pixels_of(20, channels=1).expand(20, 3, 9, 11)
    cut = cut_and_mirrored(lambda pixels: pixels, 5)(pixels, torch.Generator().manual_seed(2))
    assert torch.equal(cut[:, 0], cut[:, 1])
    assert torch.equal(cut[:, 0], cut[:, 2])


def test_crops_at_evaluation():
    pixels = pixels_of(2)
    (center,) = square_crops(pixels, 5, 1)
    assert torch.equal(center, pixels[:, :, 2:7, 3:8])
    ten = list(square_crops(pixels, 5, 10))
    assert len(ten) == 10
    assert torch.equal(ten[0], center)
    assert all(torch.equal(mirror, square.flip(3)) for square, mirror in zip(ten[::2], ten[1::2], strict=True))
    assert torch.equal(ten[2], pixels[:, :, :5, :5])
    assert torch.equal(ten[8], pixels[:, :, -5:, -5:])


def test_squares_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="from 1 to 9, for squares of images of 9 x 11; got 10"):
        list(square_crops(pixels_of(1), 10, 1))
    with pytest.raises(ArgumentError, match="count must be 1 or 10; got 3"):
        list(square_crops(pixels_of(1), 5, 3))
    with pytest.raises(ArgumentError, match="got 0"):
        cut_and_mirrored(lambda pixels: pixels, 0)(pixels_of(1), torch.Generator())
