"""Values as the page's script and as readers need them."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from typing import Any

from normkit.figures.figure import Cell
from normkit.jsonable import jsonable

MISSING = "–"  # noqa: RUF001, a dash as wide as a digit
_DIGITS = 4  # significant ones, of a column's largest number
_SPAN = 1e4  # a column that spans more than this has no number of decimals that suits all of it


def plain(value: Any) -> Any:
    """Return a value in JSON's types; NaN and infinity become null, which the script draws as a gap."""
    return jsonable(value, nonfinite=lambda _: None)


def is_number(cell: object) -> bool:
    """Whether a cell is aligned by its digits."""
    return isinstance(cell, numbers.Real) and not isinstance(cell, bool)


def column_texts(cells: Sequence[Cell]) -> list[str]:
    """Write a column: the same number of decimals for all, and no more than any of its numbers has."""
    decimals = _common_decimals([float(cell) for cell in cells if is_number(cell) and math.isfinite(cell)])  # type: ignore[arg-type]
    return [cell_text(cell, decimals) for cell in cells]


def cell_text(cell: Cell, decimals: int | None = None) -> str:
    """Write a cell; if `decimals` is None, a number gets four significant digits in as few characters as possible."""
    if cell is None or isinstance(cell, str):
        return MISSING if cell is None else cell
    if not math.isfinite(cell):
        return {math.inf: "∞", -math.inf: "−∞"}.get(cell, "NaN")  # noqa: RUF001, the sign and not the hyphen
    if isinstance(cell, numbers.Integral):
        return f"{cell:,}"
    return number_text(cell) if decimals is None else f"{cell:,.{decimals}f}"


def number_text(value: float) -> str:
    """Write a number on its own, whole ones in full."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:,.{max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))}f}".rstrip("0").rstrip(".")
    return f"{value:.{_DIGITS}g}"


def setting_text(value: Any) -> str:
    """Write a setting: words as they are, the rest as JSON has it."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def seconds_text(seconds: float) -> str:
    """Write a duration in seconds, minutes or hours."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _common_decimals(values: Sequence[float]) -> int | None:
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return 0
    if max(sizes) / min(sizes) > _SPAN or not (1e-4 <= max(sizes) < 1e9):
        return None
    wanted = max(0, _DIGITS - 1 - math.floor(math.log10(max(sizes))))
    return min(wanted, max(_decimals_of(value) for value in values))


def _decimals_of(value: float) -> int:
    text = repr(float(value))
    return 20 if "e" in text else len(text.partition(".")[2].rstrip("0"))
