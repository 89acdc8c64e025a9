import pytest

from normkit.bench.spread import Spread, ratio


def test_quartiles_lie_inside_what_was_measured():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.25, 1.5, 1.75)


def test_the_ratio_is_of_rounds_not_of_medians():
    # A machine that slows down by ten halfway changes both, and no round's ratio.
    assert ratio([2.0, 20.0, 20.0], [1.0, 10.0, 10.0]) == Spread(2.0, 2.0, 2.0)
    assert ratio([3.0, 20.0, 1.0], [1.0, 10.0, 1.0]).median == 2.0


def test_rounds_that_do_not_match_are_an_error():
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0, 2.0], [1.0, 2.0, 3.0])
