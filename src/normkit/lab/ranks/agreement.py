"""What must be the same on all ranks, compared before training: a difference would hang it, or spoil it in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch

from normkit.errors import DistributedError
from normkit.lab import data
from normkit.lab.data.digest import digest_of
from normkit.lab.experiment import Experiment, Training, Trial
from normkit.lab.ranks.group import Ranks
from normkit.named_layers import display_name


def check_agreement(ranks: Ranks, facts: Mapping[str, Sequence[str]]) -> None:
    """Raise, on all ranks, if one has other facts than the first; each is a list of lines under a name."""
    first, *others = ranks.gather(dict(facts))
    for rank, theirs in enumerate(others, start=1):
        for name, lines in first.items():
            for a, b in zip_longest(lines, theirs[name], fillvalue="nothing"):
                if a != b:
                    raise DistributedError(
                        f"All ranks need the same {name}; rank 0 has {a}, rank {rank} has {b}. Give all of them the "
                        "same code, versions, command and data."
                    )


def facts_before(experiment: Experiment, trial: Trial) -> dict[str, list[str]]:
    """What a trial is made of."""
    found = data.LOADERS[experiment.takes](trial.data)
    return {"torch": [torch.__version__], "trial": [str(trial)], "data": [f"{trial.data} ({digest_of(found)})"]}


def facts_of(training: Training) -> dict[str, list[str]]:
    """What training it became."""
    model = training.model
    tensors, layers = (*model.named_parameters(), *model.named_buffers()), model.named_modules()
    return {
        "number of steps": [str(training.steps)],
        "parameters and buffers": [f"{name} of {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors],
        "layers": [f"{display_name(name)}: {type(layer).__name__}({layer.extra_repr()})" for name, layer in layers],
    }
