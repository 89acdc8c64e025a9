"""Records: what a trial was and what it measured, one JSON object per line, written as it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normkit.json_lines import Line, RecordError, read_lines

RECORDS = "records"
TIMES = frozenset({"seconds", "started", "rate"})  # the keys that two runs of one trial may differ in


@dataclass(frozen=True)
class TrialRecord:
    """A trial as it was recorded: its description, what it measured, and how it ended."""

    path: Path
    header: Line  # experiment, arm, seed, scale, data, settings, versions, commit, machine
    measured: Sequence[Line]  # each with its `step` and `seconds`
    end: Line | None  # None: it has not ended; else `status` is "done" or "diverged"

    @property
    def arm(self) -> str:
        """The arm's name."""
        return str(self.header["arm"])

    @property
    def seed(self) -> int:
        """The trial's seed."""
        return int(self.header["seed"])

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """The steps at which this key was measured, and the values."""
        lines = [line for line in self.measured if line.get(key) is not None]
        return [float(line["step"]) for line in lines], [float(line[key]) for line in lines]


@dataclass(frozen=True)
class Run:
    """Trials in a directory."""

    path: Path
    trials: Sequence[TrialRecord]

    def of(self, arm: str) -> list[TrialRecord]:
        """The trials of an arm, by seed."""
        return sorted((trial for trial in self.trials if trial.arm == arm), key=lambda trial: trial.seed)

    def by_experiment(self) -> list[Run]:
        """The run of a set, split into one for each experiment."""
        names = dict.fromkeys(str(trial.header["experiment"]) for trial in self.trials)
        return [
            Run(self.path, [trial for trial in self.trials if trial.header["experiment"] == name]) for name in names
        ]

    def by_seed(self) -> list[Run]:
        """The run, split into one for each seed."""
        seeds = sorted({trial.seed for trial in self.trials})
        return [Run(self.path, [trial for trial in self.trials if trial.seed == seed]) for seed in seeds]

    @property
    def header(self) -> Line:
        """What all trials share."""
        return self.trials[0].header


def read_trial(path: Path) -> TrialRecord:
    """Read a record; a line that was cut short when its trial was killed is left out."""
    lines = list(read_lines(path))
    if not lines or "experiment" not in lines[0]:
        raise RecordError(
            f"{path} is not a trial's record: its first line must name the experiment. Move it elsewhere."
        )
    end = lines[-1] if "status" in lines[-1] else None
    return TrialRecord(path, lines[0], lines[1:-1] if end else lines[1:], end)


def read_run(directory: Path) -> Run:
    """Read all records of a run, except those of trials that have only just begun: they have no complete line."""
    found = [path for path in sorted((directory / RECORDS).glob("*.jsonl")) if b"\n" in path.read_bytes()]
    if not found:
        raise RecordError(f"{directory} holds no run: it has no {RECORDS}/*.jsonl. Give the --out of a run.")
    return Run(directory, [read_trial(path) for path in found])


def without_times(line: Line) -> Line:
    """A line without the values that may differ between two runs of one trial."""
    return {key: value for key, value in line.items() if key not in TIMES}
