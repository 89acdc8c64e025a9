"""Medians and ranges over seeds of which some have no value, verdicts, and figures."""

import math
from pathlib import Path

import pytest

from normkit.lab.record import TrialRecord
from normkit.lab.summaries import accuracy_figures, curve_of_medians, late_gain, verdict, with_range


@pytest.mark.parametrize(
    ("values", "never", "text"),
    [
        ([100.0], math.inf, "100"),
        ([300.0, 100.0, 200.0], math.inf, "200 (100 to 300)"),
        ([300.0, None, 200.0], math.inf, "300 (200 to 300, 1 never)"),  # the most steps of the three are endless
        ([300.0, None, 200.0], -math.inf, "200 (200 to 300, 1 never)"),
        ([None, None, 200.0], -math.inf, "never (200 to 200, 2 never)"),
        ([None, None], math.inf, "never"),
        ([], math.inf, "-"),
    ],
)
def test_a_median_counts_seeds_that_never_reached_the_level(values, never, text):
    assert with_range(values, never=never) == text


@pytest.mark.parametrize(
    ("holds", "is_complete", "outcome"),
    [
        ([True, True], True, "supported"),
        ([True, False], True, "unclear"),
        ([False, False], True, "contradicted"),
        ([True, True], False, "unclear"),
        ([True, None], True, "unclear"),
        ([False, None], True, "unclear"),
        ([], True, "unclear"),
    ],
)
def test_the_verdict_over_parts_of_a_claim(holds, is_complete, outcome):
    assert verdict(holds, is_complete) == outcome


@pytest.mark.parametrize(
    ("holds", "also", "outcome"),
    [
        ([True, True], [True], "supported"),
        ([True, True], [False], "unclear"),  # what support needs besides cannot contradict
        ([True, False], [True], "contradicted"),
        ([True, None], [True], "unclear"),
        ([None, False], [True], "contradicted"),
    ],
)
def test_a_verdict_that_one_part_can_contradict(holds, also, outcome):
    assert verdict(holds, True, also=also, contradicted_by="any") == outcome


def trial(*accuracies):
    lines = [{"step": 10 * i, "seconds": i, "accuracy": value} for i, value in enumerate(accuracies)]
    return TrialRecord(Path(), {}, lines, None)


def test_a_plateau_is_where_the_last_quarter_brings_nothing():
    assert late_gain(trial(0.1, 0.3, 0.5, 0.6, 0.7)) == pytest.approx(0.1)  # 0.6 after 30 of 40 steps
    assert late_gain(trial(0.1, 0.3, 0.75, 0.75, 0.74)) == 0
    assert math.isnan(late_gain(trial()))


def test_the_close_up_has_those_that_come_near_the_best():
    whole, close, timed = accuracy_figures({"high": [trial(0.1, 0.8, 0.9)], "low": [trial(0.1, 0.2, 0.3)]})
    assert [curve.name for curve in whole.curves] == ["high", "low"]
    assert [(curve.name, list(curve.x)) for curve in close.curves] == [("high", [20])]
    assert [list(curve.x) for curve in timed.curves] == [[0, 1, 2]] * 2


def test_a_curve_of_medians_leaves_out_places_without_values():
    curve = curve_of_medians("a", [(1, [3.0, 1.0, 2.0]), (2, []), (3, [5.0])])
    assert (curve.x, curve.y, curve.low, curve.high) == ([1, 3], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
    assert curve_of_medians("a", [(1, [3.0]), (2, [4.0])]).low is None  # one seed has no range
    assert curve_of_medians("a", []).x == []
