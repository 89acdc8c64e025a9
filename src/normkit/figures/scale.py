"""Axes: where a value lies between two ends, and which values are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from normkit.figures.values import number_text

Tick = tuple[float, str]
_LARGEST = 1e300  # beyond it, the distance of two values may be infinite
_ROUNDING = 1e-6  # of a step: so near to an end, a label is still on the axis
_NICE = (1.0, 2.0, 5.0, 10.0)


class Scale(NamedTuple):
    """An axis from its lower to its upper end."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """Where a value lies: 0 is the lower end, 1 the upper."""
        low, high, at = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)


def is_shown(value: float | None, is_log: bool) -> bool:
    """Whether a value has a place on an axis: what is not finite has none, and zero none on a logarithmic one."""
    return value is not None and math.isfinite(value) and abs(value) < _LARGEST and (value > 0 or not is_log)


def scale_of(values: Iterable[float | None], is_log: bool, margin: float = 0.04) -> Scale:
    """The axis that holds all values that can be shown, with a margin at both ends; a single value is in its middle."""
    shown = [float(value) for value in values if value is not None and is_shown(value, is_log)]
    if is_log:
        low, high = _widened([math.log10(value) for value in shown], margin)
        return Scale(10**low, 10**high, is_log=True)
    return Scale(*_widened(shown, margin), is_log=False)


def ticks(scale: Scale, most: int, *, is_whole: bool = False) -> list[Tick]:
    """The values to label, about as many as asked for and no more, each with its text; whole numbers if need be."""
    return (_log_ticks(scale, most) if scale.is_log else []) or _even_ticks(scale, most, is_whole)


def _widened(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = margin * (high - low) or 0.1 * abs(low) or 0.5
    return low - room, high + room


def _even_ticks(scale: Scale, most: int, is_whole: bool) -> list[Tick]:
    step = _nice_step((scale.high - scale.low) / most)
    step = max(1.0, step) if is_whole else step
    first, last = math.ceil(scale.low / step - _ROUNDING), math.floor(scale.high / step + _ROUNDING)
    found = [k * step for k in range(first, last + 1)]
    return [(value, _tick_text(value, step, max(map(abs, found)))) for value in found]


def _nice_step(least: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(nice * power for nice in _NICE if nice * power >= least * (1 - _ROUNDING))


def _tick_text(value: float, step: float, largest: float) -> str:
    """A label with just the digits that tell it from the next."""
    power = math.floor(math.log10(step) + _ROUNDING)
    if largest < 1e7 and power >= -5:
        return f"{value:,.{max(0, -power)}f}"
    digits = 1 + math.floor(math.log10(largest)) - power if largest else 1
    return f"{value:.{max(1, digits)}g}"


def _log_ticks(scale: Scale, most: int) -> list[Tick]:
    """Powers of ten, or if these are too few, their doubles and fives too; nothing if all of that is too few."""
    low, high = math.ceil(math.log10(scale.low) - _ROUNDING), math.floor(math.log10(scale.high) + _ROUNDING)
    powers = range(low, high + 1)
    if len(powers) > 2:
        stride = -(-len(powers) // most)
        return [(10.0**k, number_text(10.0**k)) for k in powers if k % stride == 0]
    found = [value for value in _nice_values(low - 1, high + 1) if scale.low <= value <= scale.high]
    return [(value, number_text(value)) for value in found] if 2 <= len(found) <= most else []


def _nice_values(first: int, last: int) -> Iterator[float]:
    for power in range(first, last + 1):
        yield from (nice * 10.0**power for nice in _NICE[:-1])
