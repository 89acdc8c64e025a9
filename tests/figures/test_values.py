"""Numbers as readers want them."""

import math

import pytest

from normkit.figures.values import MISSING, cell_text, column_texts


@pytest.mark.parametrize(("cells", "texts"), [
    ([0.7221834, 0.73], ["0.7222", "0.7300"]),
    ([1.0, 2.0, None], ["1", "2", MISSING]),
    ([31_000_000, 5], ["31,000,000", "5"]),
    ([1e-7, 12_345.678], ["1e-07", "12,346"]),
    ([math.inf, -math.inf, math.nan], ["∞", "\N{MINUS SIGN}∞", "NaN"]),
    (["a", -72.25, 0], ["a", "-72.25", "0"]),
    ([], []),
])  # fmt: skip
def test_columns_are_written_with_common_decimals(cells, texts):
    assert column_texts(cells) == texts


def test_a_number_on_its_own_keeps_four_digits():
    assert [cell_text(v) for v in (0.123456, 1234.56, 2.0, 0.5, 1e20)] == ["0.1235", "1,235", "2", "0.5", "1e+20"]
