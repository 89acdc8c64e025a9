"""What is said about values over seeds, when some have none."""

import math

import pytest

from normkit.lab.comparing import verdict, with_range


@pytest.mark.parametrize(
    ("values", "never", "told"),
    [
        ([100.0], math.inf, "100"),
        ([300.0, 100.0, 200.0], math.inf, "200 (100 to 300)"),
        ([300.0, None, 200.0], math.inf, "300 (200 to 300, 1 never)"),  # the most steps of the three are endless
        ([300.0, None, 200.0], -math.inf, "200 (200 to 300, 1 never)"),
        ([None, None, 200.0], -math.inf, "never (200 to 200, 2 never)"),
        ([None, None], math.inf, "-"),
    ],
)
def test_a_median_counts_those_that_never_came(values, never, told):
    assert with_range(values, never=never) == told


@pytest.mark.parametrize(
    ("holds", "is_complete", "outcome"),
    [
        ([True, True], True, "supported"),
        ([True, False], True, "unclear"),
        ([False, False], True, "contradicted"),
        ([True, True], False, "unclear"),
    ],
)
def test_the_verdict_over_parts_of_a_claim(holds, is_complete, outcome):
    assert verdict(holds, is_complete) == outcome
