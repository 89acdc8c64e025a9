"""Symbols and dashes have the sizes that they should."""

import math
from itertools import pairwise

import pytest

from normkit.figures.drawing import SYMBOLS
from normkit.figures.marks import dashes, symbol_shape


def test_every_symbol_has_a_shape_of_its_own_around_its_point():
    shapes = [symbol_shape(i, (10.0, 20.0), 4.0) for i in range(len(SYMBOLS))]
    assert len({tuple(shape) for shape in shapes}) == len(SYMBOLS)
    for shape in shapes:
        assert max(math.dist(point, (10.0, 20.0)) for point in shape) == pytest.approx(4.0, rel=0.2)


def test_dashes_go_round_corners_at_an_even_pace():
    points = [(0.0, 0.0), (10.0, 0.0), (10.0, 10.0), (4.0, 18.0)]  # 30 long
    found = list(dashes(points, 3.0, 2.0))
    assert sum(math.dist(a, b) for a, b in found) == pytest.approx(18.0)
    assert found[0] == [(0.0, 0.0), (3.0, 0.0)]
    assert found[1] == [(5.0, 0.0), (8.0, 0.0)]
    starts = [a for a, _ in found]
    assert all(math.dist(a, b) <= 5.0 + 1e-9 for a, b in pairwise(starts))


def test_points_on_one_another_have_no_dash():
    assert list(dashes([(1.0, 1.0), (1.0, 1.0)], 3.0, 2.0)) == []
