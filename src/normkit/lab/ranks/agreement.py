"""What must be the same on all ranks, compared before training: a difference would hang it, or spoil it in silence."""

from __future__ import annotations

import torch

from normkit.lab import data
from normkit.lab.data.digest import digest_of
from normkit.lab.experiment import Experiment, Training, Trial
from normkit.lab.ranks.group import Ranks
from normkit.ranks import Facts, must_agree, structure_of

_ADVICE = "Give all of them the same code, versions, command and data."


def check_agreement(ranks: Ranks, facts: Facts) -> None:
    """Raise, on all ranks, if one has other facts than the first; each is a list of lines under a name."""
    must_agree(ranks.gather(dict(facts)), _ADVICE)


def facts_before(experiment: Experiment, trial: Trial) -> dict[str, list[str]]:
    """What a trial is made of."""
    found = data.LOADERS[experiment.takes](trial.data)
    return {"torch": [torch.__version__], "trial": [str(trial)], "data": [f"{trial.data} ({digest_of(found)})"]}


def facts_of(training: Training) -> dict[str, list[str]]:
    """What training it became."""
    return {"number of steps": [str(training.steps)], **structure_of(training.model)}
