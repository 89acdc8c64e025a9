"""The experiments, one file each."""

from __future__ import annotations

import difflib
import importlib

from normkit.errors import ArgumentError
from normkit.lab.experiment import Experiment

# In the order in which they are listed, each with the module that it is in: none is imported before it is asked for.
NAMES: dict[str, str] = {"sigmoid-mlp": "sigmoid_mlp"}


def experiment_named(name: str) -> Experiment:
    """Return an experiment; for a name that there is not, say which is nearest."""
    if name not in NAMES:
        raise ArgumentError(
            f"There is no experiment {name!r}.{nearest(name, list(NAMES))} `normkit lab list` lists them."
        )
    found: Experiment = importlib.import_module(f"{__name__}.{NAMES[name]}").EXPERIMENT
    return found


def nearest(name: str, names: list[str]) -> str:
    """A sentence with the name that was probably meant, or none."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
