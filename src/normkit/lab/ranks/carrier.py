"""What carries a trial over all ranks: each trains on its part, the first alone writes."""

from __future__ import annotations

from pathlib import Path

import torch

from normkit.json_lines import Line
from normkit.lab.experiment import Experiment, Training, Trial
from normkit.lab.ranks.agreement import check_agreement, facts_before, facts_of
from normkit.lab.ranks.checkpoint import forget_together, load_together, save_together
from normkit.lab.ranks.group import Ranks
from normkit.lab.ranks.options import StepOptions
from normkit.lab.ranks.training import check_divisible, over_ranks
from normkit.lab.trial import OneProcess, Writer


class AllRanks:
    """Carries a trial over the ranks of a group."""

    def __init__(self, ranks: Ranks, options: StepOptions) -> None:
        self._ranks, self._options = ranks, options

    def set_up(self, experiment: Experiment, trial: Trial) -> tuple[Training, Line]:
        """A rank's part of a training, if that can be parted and is the same on all ranks."""
        ranks = self._ranks
        check_agreement(ranks, ranks.together(lambda: facts_before(experiment, trial)))
        training = self._checked(experiment, trial)
        check_agreement(ranks, facts_of(training))
        if ranks.rank > 0:  # weights began alike; what is drawn for examples, as by Dropout, is each rank's own
            torch.manual_seed(torch.initial_seed() + (ranks.rank << 32))
        part = over_ranks(training, ranks, self._options)
        return part, {"ranks": ranks.count, "batch": self._batch(part), **self._options._asdict()}

    def writer(self, record: Path, size: int, logs: Path | None, step: int) -> Writer:
        """The first rank's is that of one process."""
        return OneProcess().writer(record, size, logs, step) if self._ranks.rank == 0 else _Silent()

    def save(self, state: Line, checkpoint: Path) -> None:
        """Keep a state in a folder that all write to."""
        save_together(state, _folder(checkpoint), self._ranks)

    def load(self, checkpoint: Path) -> Line | None:
        """Read it; the random state is that of this rank."""
        return load_together(_folder(checkpoint), self._ranks)

    def forget(self, checkpoint: Path) -> None:
        """Remove it."""
        forget_together(_folder(checkpoint), self._ranks)

    def _checked(self, experiment: Experiment, trial: Trial) -> Training:
        def check() -> Training:
            training = experiment.training(trial)
            check_divisible(training, trial.experiment)
            return training

        return self._ranks.together(check)

    def _batch(self, part: Training) -> int:
        """How many examples a batch has on all ranks together."""
        return sum(self._ranks.gather(len(next(part.batches(0))[1])))


class _Silent:
    """The record of a rank that is not the first: none."""

    def write(self, line: Line) -> int:
        """Write nothing."""
        return 0

    def close(self) -> None:
        """End nothing."""


def _folder(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".ranks")
