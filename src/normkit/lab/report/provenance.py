"""What was run, and on what, according to the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from normkit.figures.values import seconds_text, setting_text
from normkit.lab.record import Run, TrialRecord

STATES = ("done", "diverged", "unfinished")
_VERSIONS = ("normkit", "torch", "python")
_MACHINE = ("cpu", "cores", "platform", "kernels", "allocator", "huge_pages")

_RANKS = ("ranks", "batch", "micro_batches", "precision")  # of trials over several processes


class ArmFacts(NamedTuple):
    """An arm, over its seeds."""

    name: str
    seeds: str
    states: str
    has_diverged: bool
    steps: Any
    parameters: Any
    time: str
    settings: dict[str, str]


class Odd(NamedTuple):
    """A trial that did not reach its planned end."""

    arm: str
    seed: int
    state: str
    step: Any
    why: str


class Facts(NamedTuple):
    """What a reader wants to know about a run."""

    summary: str
    states: str
    started: str
    arms: list[ArmFacts]
    odd: list[Odd]
    environment: list[tuple[str, str]]
    settings: list[tuple[str, list[str], bool]]  # a name, each arm's value, and whether these differ


def facts_of(run: Run) -> Facts:
    """Gather what the headers and the ends of a run's records say."""
    arms = [_arm_facts(name, run.of(name)) for name in _distinct(trial.arm for trial in run.trials)]
    seeds = len({trial.seed for trial in run.trials})
    about = [_joined(run, key) for key in ("experiment", "scale", "data")]
    counts = f"{_count(len(arms), 'arm')}, {_count(seeds, 'seed')}, {_count(len(run.trials), 'trial')}"
    return Facts(
        summary=" · ".join([*filter(None, about), counts]),
        states=states_text(run.trials),
        started=_started(run.trials),
        arms=arms,
        odd=[_odd(trial) for arm in arms for trial in run.of(arm.name) if state_of(trial) != "done"],
        environment=_environment(run),
        settings=_settings(arms),
    )


def conditions_of(run: Run) -> dict[str, str]:
    """What two runs of the same experiments may differ in: the scale, the data, versions, the machine, seeds."""
    about = {key: _joined(run, key) for key in ("scale", "data")}
    return about | dict(_environment(run))


def settings_of(run: Run) -> dict[str, str]:
    """The arms of an experiment, and of each setting the values that arms have."""
    settings = [trial.header.get("settings", {}) for trial in run.trials]
    names = _distinct(name for of_trial in settings for name in of_trial)
    arms = "; ".join(_distinct(trial.arm for trial in run.trials))
    return {"arms": arms} | {name: _values(of_trial.get(name) for of_trial in settings) for name in names}


def state_of(trial: TrialRecord) -> str:
    """Return "done", "diverged" or, for a trial without an end, "unfinished"."""
    return "unfinished" if trial.end is None else str(trial.end["status"])


def states_text(trials: Iterable[TrialRecord]) -> str:
    """Count states: "5 done, 1 diverged"."""
    counts = Counter(map(state_of, trials))
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def seeds_text(seeds: Sequence[int]) -> str:
    """List seeds in their order, and three or more without a gap by their ends."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _arm_facts(name: str, trials: Sequence[TrialRecord]) -> ArmFacts:
    header = trials[0].header
    return ArmFacts(
        name=name,
        seeds=seeds_text([trial.seed for trial in trials]),
        states=states_text(trials),
        has_diverged=any(state_of(trial) == "diverged" for trial in trials),
        steps=header.get("steps"),
        parameters=header.get("parameters"),
        time=seconds_text(sum(float(_last(trial).get("seconds") or 0.0) for trial in trials)),
        settings={key: setting_text(value) for key, value in header.get("settings", {}).items()},
    )


def _odd(trial: TrialRecord) -> Odd:
    why = str(_last(trial).get("why") or "") if trial.end else f"stopped, or still running; {_planned(trial)}"
    return Odd(trial.arm, trial.seed, state_of(trial), _last(trial).get("step"), why)


def _planned(trial: TrialRecord) -> str:
    steps = trial.header.get("steps")
    return f"{steps:,} steps are planned" if isinstance(steps, int) else "its length is not known"


def _last(trial: TrialRecord) -> dict[str, Any]:
    return trial.end or (trial.measured[-1] if trial.measured else {})


def _settings(arms: Sequence[ArmFacts]) -> list[tuple[str, list[str], bool]]:
    """Every setting, those that arms differ in first: they are what is compared."""
    names = _distinct(name for arm in arms for name in arm.settings)
    rows = [(name, [arm.settings.get(name, "") for arm in arms]) for name in names]
    found = [(name, values, len(set(values)) > 1) for name, values in rows]
    return sorted(found, key=lambda row: not row[2])


def _environment(run: Run) -> list[tuple[str, str]]:
    """What a run ran on; where its trials ran on several things, all of them."""
    environments = [trial.header.get("environment", {}) for trial in run.trials]
    found = [("commit", _joined(run, "commit"))]
    found += [(key, _values(e.get(key) for e in environments)) for key in (*_VERSIONS, *_MACHINE)]
    found += [(key, _joined(run, key)) for key in _RANKS]
    found += [("threads", _joined(run, "threads")), ("seeds", seeds_text(sorted({t.seed for t in run.trials})))]
    return [(key.replace("_", " "), value) for key, value in found if value]


def _joined(run: Run, key: str) -> str:
    return _values(trial.header.get(key) for trial in run.trials)


def _values(values: Iterable[Any]) -> str:
    return "; ".join(_distinct(_value_text(value) for value in values if value not in (None, {}, [])))


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return setting_text(value)


def _started(trials: Sequence[TrialRecord]) -> str:
    times = sorted(str(trial.header["started"]) for trial in trials if trial.header.get("started"))
    return times[0] if times else ""


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
