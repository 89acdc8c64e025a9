"""Axes hold all values, and their labels are few, even and told apart."""

import math

import pytest

from normkit.figures.scale import Scale, is_shown, scale_of, ticks


def texts(scale, most=6, **options):
    return [text for _, text in ticks(scale, most, **options)]


@pytest.mark.parametrize(("values", "is_log"), [
    ([0.0, 1.0], False),
    ([-3.0, math.nan, 5e-3, math.inf, None], False),
    ([7.0], False),
    ([0.0], False),
    ([], False),
    ([1e-6, 1e3, 0.0, -1.0], True),
    ([2.5], True),
    ([], True),
    ([1e308, -1e308, 1.0], False),
])  # fmt: skip
def test_every_value_that_is_shown_has_a_place_inside(values, is_log):
    scale = scale_of(values, is_log)
    shown = [value for value in values if is_shown(value, is_log)]
    assert all(0 < scale.place(value) < 1 for value in shown)
    assert scale.low < scale.high
    assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value, _ in ticks(scale, 6))


def test_a_logarithmic_axis_has_a_place_for_each_factor():
    scale = Scale(0.1, 1000.0, is_log=True)
    assert [round(scale.place(v), 12) for v in (0.1, 1.0, 10.0, 100.0, 1000.0)] == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    (-0.02, 0.052, ["-0.02", "0.00", "0.02", "0.04"]),
    (0.0, 50_000.0, ["0", "10,000", "20,000", "30,000", "40,000", "50,000"]),
    (0.0, 3e9, ["0", "5e+08", "1e+09", "1.5e+09", "2e+09", "2.5e+09", "3e+09"]),
    (1.000001, 1.000004, ["1.000001", "1.0000015", "1.000002", "1.0000025", "1.000003", "1.0000035", "1.000004"]),
])  # fmt: skip
def test_labels_have_the_digits_that_tell_them_apart(low, high, expected):
    assert texts(Scale(low, high, is_log=False)) == expected


def test_steps_are_whole():
    assert texts(Scale(-0.1, 3.1, is_log=False), 8, is_whole=True) == ["0", "1", "2", "3"]
    assert len(texts(Scale(-0.1, 3.1, is_log=False), 8)) > 4


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0009, 11.0, ["0.001", "0.01", "0.1", "1", "10"]),
    (1e-9, 1e3, ["1e-08", "1e-06", "0.0001", "0.01", "1", "100"]),
    (1.9, 21.0, ["2", "5", "10", "20"]),
    (3.1, 3.9, ["3.2", "3.4", "3.6", "3.8"]),
])  # fmt: skip
def test_a_logarithmic_axis_is_labelled_at_powers_of_ten_or_between(low, high, expected):
    assert texts(Scale(low, high, is_log=True), 7) == expected


@pytest.mark.parametrize("is_log", [False, True])
def test_labels_are_never_more_than_room_for_them(is_log):
    for high in (1.5, 7.0, 99.0, 1e5, 1e12):
        for most in (2, 4, 8):
            assert 1 <= len(ticks(Scale(1.0, high, is_log), most)) <= most + 1
