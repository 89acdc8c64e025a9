import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normkit.jsonable import jsonable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_reading_it_back_gives_the_same(value):
    plain = jsonable(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert jsonable(plain) == plain


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2.5,)), [1, [2.5]]),
        ({3: np.float32(0.5), "n": np.int64(7)}, {"3": 0.5, "n": 7}),
        (torch.tensor([1.0, math.inf]), [1.0, "inf"]),
        ([math.nan, -math.inf], ["nan", "-inf"]),
        (Fraction(1, 2), 0.5),
        (torch.float32, "torch.float32"),
    ],
    ids=str,
)
def test_what_json_has_no_type_for(value, plain):
    assert jsonable(value) == plain


def test_what_is_not_finite_as_the_caller_wants_it():
    assert jsonable({"a": [math.inf, 1.0]}, nonfinite=lambda _: None) == {"a": [None, 1.0]}
