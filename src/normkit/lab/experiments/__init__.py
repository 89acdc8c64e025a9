"""The experiments, one file each."""

from __future__ import annotations

import difflib
import importlib

from normkit.errors import ArgumentError
from normkit.lab.experiment import Experiment

# In the order in which they are listed, each with the module that it is in: none is imported before it is asked for.
NAMES: dict[str, str] = {
    "sigmoid-mlp": "sigmoid_mlp",
    "inception": "inception",
    "ensemble": "ensemble",
    "recipe": "recipe",
    "learning-rates": "learning_rates",
    "affine": "affine",
    "placement": "placement",
    "inference": "inference",
}

# Experiments that are run together and reported on one page. What takes longest comes first: cores are shared better.
SETS: dict[str, tuple[str, ...]] = {"paper": ("inception", "sigmoid-mlp")}


def names_in(name: str) -> tuple[str, ...]:
    """The experiments that a name stands for: those of a set, or one; for a name of neither, say which is nearest."""
    if name in SETS:
        return SETS[name]
    if name not in NAMES:
        raise ArgumentError(
            f"There is no experiment {name!r}.{nearest(name, [*NAMES, *SETS])} `normkit lab list` lists them."
        )
    return (name,)


def experiment_named(name: str) -> Experiment:
    """Return an experiment; a set is not one."""
    (name,) = names_in(name)
    found: Experiment = importlib.import_module(f"{__name__}.{NAMES[name]}").EXPERIMENT
    return found


def nearest(name: str, names: list[str]) -> str:
    """A sentence with the name that was probably meant, or none."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
