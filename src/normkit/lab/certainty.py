"""How sure a verdict is: what each seed says by itself, and how much of the run has ended."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from normkit.lab.experiments import experiment_named
from normkit.lab.findings import Outcome
from normkit.lab.plan import RunPlan
from normkit.lab.record import Run


class Certainty(NamedTuple):
    """The verdicts that follow from the records of each seed alone, and the trials that have ended of those planned."""

    alone: tuple[Outcome, ...]  # by seed
    ended: int
    planned: int

    @property
    def is_complete(self) -> bool:
        """Whether every trial has ended."""
        return self.ended >= self.planned

    def text(self, outcome: Outcome) -> str:
        """Say how sure a run's outcome is."""
        if not self.is_complete:
            return f"incomplete: {self.ended} of {self.planned} trials have ended"
        if len(self.alone) == 1:
            return "one seed"
        others = Counter(each for each in self.alone if each != outcome)
        same = f"the same in {self.alone.count(outcome)} of {len(self.alone)} seeds alone"
        return ", ".join([same, *(f"{each} in {count}" for each, count in others.items())])


def certainty_of(run: Run, plan: RunPlan) -> Certainty:
    """Judge the records of an experiment again, seed by seed, and count them against the plan."""
    experiment = experiment_named(str(run.header["experiment"]))
    alone = tuple(experiment.findings(of_seed).outcome for of_seed in run.by_seed())
    planned = plan._replace(name=experiment.name).trials()
    return Certainty(alone, sum(trial.end is not None for trial in run.trials), len(planned))
