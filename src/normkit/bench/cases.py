"""All that `normkit bench` can measure, and how a run's cases are chosen from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache

from normkit.bench.case import Case
from normkit.bench.families import batch, networks, options, others
from normkit.errors import ArgumentError, did_you_mean

FAMILIES: dict[str, Callable[[], Iterable[Case]]] = {
    "batch": batch.batch,
    "activations": batch.activations,
    "masks": batch.masks,
    "types": batch.types,
    "strides": batch.strides,
    "shapes": batch.shapes,
    "relatives": others.relatives,
    "evo": others.evo,
    "within": others.within,
    "calls": others.calls,
    "small": others.small,
    "memory": networks.memory,
    "models": networks.models,
    "options": options.options,
    "networks": networks.networks,
}
ON_REQUEST = ("options", "networks")  # measured only where asked for by name: many cases, and networks of others


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case there is, in order. Made when asked for: every command of normkit imports this module."""
    return tuple(case for cases in FAMILIES.values() for case in cases())


def case_id(case: Case) -> str:
    """Return the name that no other case has."""
    return f"{case.family}/{case.name}"


def choose(only: Sequence[str] = (), *, families: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """Return the cases of these families that match one of these patterns, in order.

    Without families, all but those on request; with patterns, any. Quick leaves only the cases of the quick benchmark,
    but for those that a pattern asks for.
    """
    for family in families:
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ArgumentError(f"--family must be one of {known}; got {family!r}.{did_you_mean(family, FAMILIES)}")
    candidates = [case for case in all_cases() if not families or case.family in families]
    for pattern in only:
        if not any(_matches(case, pattern) for case in candidates):
            raise ArgumentError(
                f"--only needs a family ({', '.join(families or FAMILIES)}) or a pattern of family/case; got "
                f"{pattern!r}, which no case matches. Try --only 'batch/*channels_last*'."
                f"{did_you_mean(pattern, FAMILIES)}"
            )
    if only:
        return [case for case in candidates if any(_matches(case, pattern) for pattern in only)]
    return [case for case in candidates if (case.quick or not quick) and (families or case.family not in ON_REQUEST)]


def _matches(case: Case, pattern: str) -> bool:
    return pattern == case.family or fnmatchcase(case_id(case), pattern)
