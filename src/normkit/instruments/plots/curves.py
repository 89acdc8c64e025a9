"""Curves of records: which layers and numbers there are, and their values over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from normkit.errors import ArgumentError, did_you_mean
from normkit.figures.figure import Curve
from normkit.json_lines import Line

WHOLE = "the model"  # what a curve of the model as a whole is called
_PLACE = ("step", "probe", "layer")


def records_of(records: Iterable[Line], probe: str) -> list[Line]:
    """The records of one probe, by step; raise if there are none."""
    records = list(records)
    found = sorted((r for r in records if r["probe"] == probe), key=lambda record: record["step"])
    if not found:
        there = list(dict.fromkeys(str(r["probe"]) for r in records))
        raise ArgumentError(
            f"there are no records of {probe!r}; there are {_listed(there)}.{did_you_mean(probe, there)}"
        )
    return found


def chosen_layers(records: Sequence[Line], asked: str | Sequence[str] | None) -> list[str]:
    """The layers that were named, exactly or by shell patterns, or all that there are."""
    return _chosen("layer", list(dict.fromkeys(str(r["layer"]) for r in records)), asked)


def chosen_keys(records: Sequence[Line], asked: str | Sequence[str] | None) -> list[str]:
    """The numbers that were named, or all that there are."""
    return _chosen("number", list(dict.fromkeys(key for r in records for key in r if key not in _PLACE)), asked)


def curve_of(records: Sequence[Line], layer: str, key: str, name: str) -> Curve | None:
    """A layer's values of one number over steps; None if it was never measured there.

    A value that is None between others leaves a gap. At the ends it is left out: it was not measured yet, or no more.
    """
    points = [(float(r["step"]), _number(r.get(key))) for r in records if r["layer"] == layer]
    there = [i for i, (_, value) in enumerate(points) if value is not None]
    if not there:
        return None
    kept = points[there[0] : there[-1] + 1]
    return Curve(name, [step for step, _ in kept], [math.nan if value is None else value for _, value in kept])


def evenly(names: Sequence[str], most: int) -> list[str]:
    """At most so many of the names, the first and the last among them."""
    if len(names) <= most:
        return list(names)
    return [names[round(i * (len(names) - 1) / (most - 1))] for i in range(most)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _chosen(what: str, there: Sequence[str], asked: str | Sequence[str] | None) -> list[str]:
    patterns = there if asked is None else [asked] if isinstance(asked, str) else list(asked)
    for pattern in patterns:
        if pattern not in there and not any(fnmatchcase(name, pattern) for name in there):
            raise ArgumentError(
                f"there is no {what} {pattern!r} in these records; there are {_listed(there)}."
                f"{did_you_mean(pattern, there)}"
            )
    # Names first: one may have brackets, which a pattern reads otherwise.
    return [name for name in there if name in patterns or any(fnmatchcase(name, p) for p in patterns)]


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(name or WHOLE for name in names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
