"""Values as JSON can hold them: the one place that decides what becomes of NaN and infinity."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def jsonable(value: Any, nonfinite: Callable[[float], Any] = str) -> Any:
    """Return a value in JSON's own types, so that reading it back gives an equal value.

    Tuples become lists, tensors lists or numbers, numbers of numpy and torch plain ones, and what is none of these its
    text. JSON has no NaN and no infinity: they become `nonfinite(number)`, by default "nan", "inf" and "-inf".
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else nonfinite(float(value))
    if isinstance(value, Tensor):
        return jsonable(value.tolist(), nonfinite)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, nonfinite) for key, item in value.items()}
    return [jsonable(item, nonfinite) for item in value] if isinstance(value, Sequence) else str(value)
