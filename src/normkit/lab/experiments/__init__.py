"""The experiments, one file each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab.experiment import Experiment

# In the order in which they are listed, each with its module, which is imported when it is first needed.
NAMES: dict[str, str] = {
    "sigmoid-mlp": ".sigmoid_mlp",
    "inception": ".inception",
    "ensemble": ".ensemble",
    "recipe": ".recipe",
    "learning-rates": ".learning_rates",
    "affine": ".affine",
    "placement": ".placement",
    "inference": ".inference",
    "depth": ".depth",
    "gan": ".gan",
    "covariate-shift": ".covariate_shift",
    "noisy-bn": ".noisy_bn",
    "landscape": ".landscape",
    "lp-norms": ".lp_norms",
    "scale-invariance": ".scale_invariance",
    "geometry": ".geometry",
    "coupling": ".coupling",
    "small-batch": ".small_batch",
    "shift": ".shift",
    "whitening": ".whitening",
    "norm-free": ".norm_free",
    "sequence": ".sequence",
}

# Experiments that are run together and reported on one page. Of the paper's, the longest comes first, which keeps all
# cores busy; the page of all tells the whole story.
ALL = "all"
SETS: dict[str, tuple[str, ...]] = {"paper": ("inception", "sigmoid-mlp"), ALL: tuple(NAMES)}


def names_in(name: str, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The experiments that a name stands for, those of a set or one; with `only`, those that match a pattern of it."""
    if name not in NAMES and name not in SETS:
        raise ArgumentError(
            f"There is no experiment {name!r}.{did_you_mean(name, [*NAMES, *SETS])} `normkit lab list` lists them."
        )
    names = SETS.get(name, (name,))
    for pattern in only:
        if not any(fnmatchcase(each, pattern) for each in names):
            raise ArgumentError(
                f"--only needs an experiment of {name!r}, or a pattern of its experiments; got {pattern!r}, which none "
                f"matches.{did_you_mean(pattern, names)} `normkit lab list` lists them."
            )
    return tuple(each for each in names if not only or any(fnmatchcase(each, pattern) for pattern in only))


def experiment_named(name: str) -> Experiment:
    """Return the experiment of this name, which may not be that of a set."""
    (name,) = names_in(name)
    found: Experiment = importlib.import_module(NAMES[name], __name__).EXPERIMENT
    return found
