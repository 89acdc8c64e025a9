"""What a run consists of, and the file in its directory that says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from normkit.atomic import replacing
from normkit.errors import ArgumentError
from normkit.lab.data import is_text
from normkit.lab.experiment import Experiment, Scale, Trial
from normkit.lab.experiments import SETS, experiment_named, names_in
from normkit.lab.record import RECORDS

PLAN = "run.json"


class RunPlan(NamedTuple):
    """All that a run needs to know in order to be resumed."""

    name: str  # of an experiment or a set of them
    scale: Scale
    data: str | None = None  # None: each experiment's own; of a set, for those that take it
    seeds: int | None = None  # None: each experiment's own
    ranks: int | None = None  # that share the batches of each trial; None: a trial is one process's
    micro_batches: int = 1  # see `normkit.lab.ranks.StepOptions`; only ranks have others than these
    precision: str = "float32"

    def trials(self, only: Sequence[str] = ()) -> list[Trial]:
        """Every arm with every seed: all arms with the first seed, then all with the next.

        `only` has patterns of the experiments whose trials are wanted. It is no part of the plan: a run may be made in
        several goes.
        """
        experiments = [experiment_named(name) for name in names_in(self.name, only)]
        seeds = {experiment.name: self.seeds or experiment.seeds[self.scale] for experiment in experiments}
        return [
            Trial(experiment.name, arm, seed, self.scale, self.data_of(experiment))
            for seed in range(max(seeds.values()))
            for experiment in experiments
            if seed < seeds[experiment.name]
            for arm in experiment.arms(self.scale)
        ]

    def data_of(self, experiment: Experiment) -> str:
        """What an experiment runs on: the data that was chosen, if there was, and its own if that is of another kind.

        An experiment that is run alone gets what was chosen in any case, and says itself what is wrong with it.
        """
        if self.data is None or (self.name in SETS and is_text(self.data) != (experiment.takes == "text")):
            return experiment.data
        return self.data


def write_plan(plan: RunPlan, directory: Path) -> None:
    """Begin a run in a directory that has none."""
    if (directory / RECORDS).exists():
        raise ArgumentError(f"{directory} holds a run already. Resume it (--resume), or choose another --out.")
    with replacing(directory / PLAN) as part:
        part.write_text(json.dumps(plan._asdict(), indent=2) + "\n")


def check_plan(plan: RunPlan, directory: Path) -> None:
    """Refuse to resume a run with another plan than its own."""
    found = read_plan(directory)
    differs = [f"{key} {own!r}" for key, own in found._asdict().items() if own != getattr(plan, key)]
    if differs:
        raise ArgumentError(
            f"The run in {directory} has {', '.join(differs)}, and can only be resumed as it is. Ask for the same, or "
            "choose another --out."
        )


def read_plan(directory: Path) -> RunPlan:
    """The plan of the run in a directory."""
    try:
        return RunPlan(**json.loads((directory / PLAN).read_text()))
    except (OSError, ValueError, TypeError):
        raise ArgumentError(
            f"{directory} holds no run that could be resumed: it has no {PLAN}. Leave out --resume to begin one."
        ) from None
