import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normkit.errors import ArgumentError
from normkit.lab.data.crops import DRAWS, evaluation_crops, random_crop

sides = st.integers(1, 3000)
near = pytest.approx


def inside(box, width, height):
    left, top, right, bottom = box
    return -1e-6 <= left < right <= width + 1e-6 and -1e-6 <= top < bottom <= height + 1e-6


@given(sides, sides, st.integers(0, 2**30))
def test_random_crops_are_within_the_image(width, height, seed):
    draws = torch.rand(DRAWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    (left, top, right, bottom), _ = crop = random_crop(width, height, draws)
    assert inside(crop.box, width, height)
    ratio = (right - left) / (bottom - top)
    assert 0.75 - 1e-9 <= ratio <= 4 / 3 + 1e-9


def test_random_crops_are_spread_as_they_should_be():
    draws = torch.rand(4000, DRAWS, dtype=torch.float64).tolist()
    crops = [random_crop(400, 400, own) for own in draws]
    areas = [(c.box[2] - c.box[0]) * (c.box[3] - c.box[1]) / 400**2 for c in crops]
    assert min(areas) < 0.09
    assert max(areas) > 0.9
    assert statistics.mean(areas) == near(0.478, abs=0.02)  # below 0.54: of the largest, not all fit
    assert statistics.mean(c.mirrored for c in crops) == near(0.5, abs=0.04)
    assert statistics.mean((c.box[0] + c.box[2]) / 2 for c in crops) == near(200, abs=4)


@pytest.mark.parametrize(("width", "height", "box"), [(900, 90, (390, 0, 510, 90)), (60, 800, (0, 360, 60, 440))])
def test_a_very_long_image_gives_its_middle(width, height, box):
    assert random_crop(width, height, [0.999] * DRAWS).box == near(box)


@given(sides, sides, st.sampled_from([1, 10, 144]))
def test_evaluation_crops_are_squares_within_the_image(width, height, count):
    crops = evaluation_crops(width, height, count)
    assert len(crops) == count
    for box, _ in crops:
        assert inside(box, width, height)
        assert box[2] - box[0] == near(box[3] - box[1])
    mirrored = [crop.box for crop in crops if crop.mirrored]
    assert mirrored == ([crop.box for crop in crops if not crop.mirrored] if count > 1 else [])


def test_the_centre():
    assert evaluation_crops(512, 256, 1)[0].box == near((144, 16, 368, 240))


def test_ten_crops():
    boxes = [crop.box for crop in evaluation_crops(512, 256, 10)[::2]]
    corners = [(0, 0), (288, 0), (0, 32), (288, 32), (144, 16)]
    assert boxes == [near((x, y, x + 224, y + 224)) for x, y in corners]


def test_all_crops_differ():
    crops = evaluation_crops(640, 480, 144)
    assert len(set(crops)) == 144 - 2 * 3 * 3  # the squares themselves are the same at all four scales


def test_another_number_of_crops():
    with pytest.raises(ArgumentError, match="1, 10 or 144; got 5"):
        evaluation_crops(10, 10, 5)
