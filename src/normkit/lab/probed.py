"""What probes recorded in trials, and how two arms compare seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from normkit.json_lines import Line
from normkit.lab.record import Run, TrialRecord

Key = str | Callable[[Line], float | None]  # of a probe's record: what it is called there, or how it is computed
Number = Callable[[TrialRecord], float | None]  # of a trial


def probe_values(
    trial: TrialRecord, probe: str, key: Key, at: Callable[[int], bool] | None = None
) -> Iterator[tuple[int, float]]:
    """What a probe recorded, over all its layers, each with the number of steps after which it was measured.

    With `at`, after some steps only. What has no value, or is not a number, is left out; infinity is kept.
    """
    for line in trial.measured:
        if at is not None and not at(int(line["step"])):
            continue
        for record in line.get("probes", ()):
            value = number_in(record, key) if record["probe"] == probe else None
            if value is not None:
                yield int(line["step"]), value


def number_in(record: Line, key: Key) -> float | None:
    """A number in a probe's record; records spell infinity as "inf"."""
    value = record.get(key) if isinstance(key, str) else key(record)
    return None if value is None or math.isnan(float(value)) else float(value)


def probe_median(trial: TrialRecord, probe: str, key: Key, at: Callable[[int], bool] | None = None) -> float | None:
    """The median over layers and steps of what a probe recorded; None if it recorded nothing."""
    found = [value for _, value in probe_values(trial, probe, key, at)]
    return median(found) if found else None


def with_medians(
    trial: TrialRecord, probe: str, keys: dict[str, Key], at: Callable[[int], bool] | None = None
) -> TrialRecord:
    """The trial with a probe's numbers in its lines, as if it had measured them itself: their medians over layers.

    `keys` has the names that they get there. With `at`, lines of other steps are left out.
    """
    lines = {line["step"]: dict(line) for line in trial.measured if at is None or at(int(line["step"]))}
    for name, key in keys.items():
        found: dict[int, list[float]] = {}
        for step, value in probe_values(trial, probe, key, at):
            found.setdefault(step, []).append(value)
        for step, values in found.items():
            lines[step][name] = median(values)
    return replace(trial, measured=list(lines.values()))


# ---- trials of two arms


def has_diverged(trial: TrialRecord) -> bool:
    """Whether a trial ended with a loss that is not finite, or no better than chance."""
    return trial.end is not None and trial.end["status"] == "diverged"


def settled_accuracy(trial: TrialRecord, key: str = "accuracy", count: int = 3) -> float:
    """The median of the last accuracies, so that the luck of one measurement does not decide; 0 after a divergence."""
    values = trial.series(key)[1][-count:]
    return 0.0 if has_diverged(trial) or not values else median(values)


def paired(run: Run, one: str, other: str) -> list[tuple[TrialRecord, TrialRecord]]:
    """The trials of two arms that have ended, seed by seed."""
    theirs = {trial.seed: trial for trial in run.of(other) if trial.end}
    return [(trial, theirs[trial.seed]) for trial in run.of(one) if trial.end and trial.seed in theirs]


def ratios(pairs: Sequence[tuple[TrialRecord, TrialRecord]], number: Number) -> list[float | None]:
    """A number of the first trial over that of the second, pair by pair; None where one diverged or lacks it."""
    return [_ratio(*map(number, pair)) if not any(map(has_diverged, pair)) else None for pair in pairs]


def _ratio(one: float | None, other: float | None) -> float | None:
    if one is None or other is None or not other or math.isinf(other):
        return None
    return one / other


def known(values: Sequence[float | None]) -> list[float]:
    """The values that there are."""
    return [value for value in values if value is not None]


def agreed(answers: Sequence[bool | None]) -> bool | None:
    """What all seeds say; None if they differ, if one of them says nothing, or if there are none."""
    said = set(answers)
    return said.pop() if len(said) == 1 else None
