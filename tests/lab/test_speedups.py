"""Factors are of steps to the other's best; what is not a number of times is said in words."""

import math
from pathlib import Path

import pytest

from normkit.lab.record import TrialRecord
from normkit.lab.speedups import exceeds, most, numbers, shown, times_fewer, trains


def trial(*accuracies, spacing=10):
    lines = [{"step": spacing * (i + 1), "seconds": 1.0, "accuracy": value} for i, value in enumerate(accuracies)]
    return TrialRecord(Path(), {"arm": "net", "seed": 0}, lines, {"status": "done"})


def test_a_net_trains_if_three_tests_in_a_row_say_so():
    assert trains(trial(0.1, 0.4, 0.2, 0.4))
    assert trains(trial(0.3, 0.3, 0.3, 0.1, 0.1, 0.1))  # and breaks down
    assert not trains(trial(0.1, 0.9, 0.1, 0.1, 0.9, 0.2))
    assert not trains(trial(0.9, 0.9))
    assert not trains(trial())


def test_a_factor_is_of_steps_to_the_others_best():
    slow, fast = trial(0.3, 0.4, 0.6, 0.8), trial(0.5, 0.8, 0.9, 0.9)
    assert times_fewer(fast, slow) == 2
    assert times_fewer(slow, fast) == 0  # never
    assert times_fewer(slow, trial(0.8, 0.8, 0.8)) == 0.25
    assert times_fewer(fast, slow, below=0.3) == 3
    assert times_fewer(slow, slow) == 1


def test_what_does_not_train_has_no_number():
    good, bad = trial(0.5, 0.8, 0.9), trial(0.1, 0.1, 0.1)
    assert times_fewer(good, bad) == math.inf
    assert times_fewer(bad, bad) is None
    assert times_fewer(bad, good) == 0


@pytest.mark.parametrize(
    ("one", "other", "answer"),
    [
        (2.0, 1.0, True),
        (1.0, 1.0, False),
        (math.inf, 9.0, True),
        (9.0, math.inf, False),
        (0.0, 0.5, False),
        (0.0, 0.0, False),
        (math.inf, math.inf, None),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_factors_are_compared_where_that_means_something(one, other, answer):
    assert exceeds(one, other) is answer


def test_most_of_those_that_say_something():
    assert most([True, None, True, False]) is True
    assert most([False, None]) is False
    assert most([True, False, None]) is most([None]) is most([]) is None


def test_factors_in_words():
    assert shown([2.0, 4.0, 3.0], "BN") == "3.0 (2.0 to 4.0)"
    assert shown([math.inf] * 3, "BN") == "only BN trains"
    assert shown([0.0, 0.0], "BN") == "never with BN"
    assert shown([None], "BN") == "neither trains"
    assert shown([], "BN") == "-"
    said = shown([None, 2.5, math.inf, 0.0, math.inf], "BN")
    assert said == "2.5; only BN trains in 2 of 5; never with BN in 1 of 5; neither trains in 1 of 5"
    assert numbers([None, 2.5, math.inf, 0.0]) == [2.5]
