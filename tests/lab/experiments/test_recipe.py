"""The verdict follows from the records, and arms differ in what their names say and in nothing else."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.experiments.recipe import ARMS, EXPERIMENT
from normkit.lab.record import Run, TrialRecord, read_trial
from normkit.lab.trial import RunOptions, run_trial, trial_paths

STEPS = [0, 100, 200, 300]
SETTINGS = {arm.name: arm.settings for arm in EXPERIMENT.arms("desk")}
ALL = [0.1, 0.7, 0.79, 0.8]


def record(arm, seed, accuracies, status="done", seconds=0.02):
    header = {"experiment": "recipe", "arm": arm, "seed": seed, "scale": "desk", "settings": dict(SETTINGS[arm])}
    measured = [
        {"step": step, "seconds": step * seconds, "accuracy": accuracy}
        for step, accuracy in zip(STEPS, accuracies, strict=True)
    ]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(light, status="done", arms=tuple(ARMS), **others):
    """All arms alike but for those that are given; two seeds."""
    accuracies = dict.fromkeys(arms, ALL) | {"bn-light": light} | others
    return Run(Path(), [record(arm, seed, accuracies[arm], status) for arm in accuracies for seed in range(2)])


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of([0.1, 0.8, 0.81, 0.82]), "supported"),
        (run_of([0.1, 0.7, 0.8, 0.795]), "supported"),  # its best counts, as in the paper
        (run_of([0.1, 0.7, 0.75, 0.78]), "contradicted"),  # lower, and never there
        (run_of([0.1, 0.1, 0.1, 0.1], status="diverged"), "contradicted"),
        (run_of([0.1, 0.7, 0.79, 0.8]), "unclear"),  # no worse, and no faster
        (run_of([0.1, 0.7, 0.79, 0.795]), "unclear"),  # lower by less than a test set's luck
        (run_of([0.1, 0.8, 0.81, 0.82], status=None), "unclear"),
        (run_of([0.1, 0.8, 0.81, 0.82], arms=("plain-all", "bn-all")), "unclear"),  # the other arms are not there yet
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_a_run_that_has_not_come_to_the_reference_has_no_level():
    findings = EXPERIMENT.findings(Run(Path(), [record("plain-all", 0, ALL, status=None)]))
    assert (findings.outcome, len(findings.reasons)) == ("unclear", 1)
    assert [row[0] for row in findings.tables[0].rows] == ["plain-all"]


def test_the_numbers_are_those_of_the_records():
    run = run_of([0.1, 0.8, 0.81, 0.82], **{"plain-all": [0.1, 0.3, 0.4, 0.5]})
    findings = EXPERIMENT.findings(run)
    table = findings.tables[0]
    rows = {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    assert rows["bn-light"] == {
        "Dropout": "0",
        "LRN": "no",
        "L2": "0.0001",
        "rate": "0.05 to 0.025",
        "best accuracy, %": "82.00 (82.00 to 82.00)",
        "steps to 80.00%": "100 (100 to 100)",
        "seconds to 80.00%": "2.0 (2.0 to 2.0)",
        "ms a step": "20.0 (20.0 to 20.0)",
    }
    assert rows["plain-all"]["steps to 80.00%"] == "never"
    assert rows["bn-all"]["steps to 80.00%"] == "300 (300 to 300)"
    assert "bn-no-dropout 80.00" in findings.reasons[3]
    assert "bn-light" not in findings.reasons[3]
    assert "plain-all 50.00" in findings.reasons[4]
    assert [curve.name for curve in findings.figures[0].curves] == list(ARMS)


def test_a_divergence_is_shown():
    trials = [record("bn-all", 0, ALL), record("bn-all", 1, [0.1] * 4, status="diverged")]
    assert EXPERIMENT.findings(Run(Path(), trials)).tables[0].rows[0][0] == "bn-all (1 of 2 diverged)"


def test_arms_change_what_their_names_say():
    def changes(arm):
        return {name: value for name, value in SETTINGS[arm].items() if SETTINGS["bn-all"][name] != value}

    assert changes("bn-no-dropout") == {"dropout": 0.0}
    assert changes("bn-no-lrn") == {"lrn": False}
    assert changes("bn-weak-l2") == {"l2": pytest.approx(1e-4)}
    assert changes("bn-light") == {"dropout": 0.0, "lrn": False, "l2": pytest.approx(1e-4)}
    assert changes("bn-light-fast-decay") == {**changes("bn-light"), "decay": SETTINGS["bn-all"]["decay"] ** 6}
    assert changes("plain-all") == {"norm": None, "rate": 0.01}
    assert changes("plain-light") == changes("plain-all") | changes("bn-light")


def training_of(arm, seed=0):
    torch.manual_seed(seed)
    return EXPERIMENT.training(Trial("recipe", arm, seed, "quick", "fashion-mini"))


@pytest.mark.parametrize("arm", experiment_named("recipe").arms("quick"), ids=lambda arm: arm.name)
def test_models_are_what_the_settings_say(arm):
    training, settings = training_of(arm), arm.settings
    kinds = [type(module) for module in training.model.modules()]
    assert (nk.BatchNorm2d in kinds) == (settings["norm"] is not None)
    assert (nk.LocalResponseNorm in kinds) == settings["lrn"]
    assert [module.p for module in training.model.modules() if isinstance(module, nn.Dropout)] == (
        [settings["dropout"]] if settings["dropout"] else []
    )
    assert training.optimizer.param_groups[0]["weight_decay"] == settings["l2"]
    assert training.rate(0) == settings["rate"]
    assert training.rate(training.steps) == pytest.approx(settings["rate"] * settings["decay"])


def test_all_arms_start_from_the_same_weights_and_see_the_same_images():
    starts = [training_of(arm, seed=3) for arm in EXPERIMENT.arms("quick")]
    weights = [
        [module.weight for module in start.model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        for start in starts
    ]
    images = [next(start.batches(0))[0] for start in starts]
    for own, seen in zip(weights[1:], images[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights[0], own, strict=True))
        assert torch.equal(images[0], seen)


def test_a_quick_trial_runs(tmp_path):
    arm = next(arm for arm in EXPERIMENT.arms("quick") if arm.name == "bn-all")
    trial = Trial("recipe", arm, 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path), lambda *step: None)
    found = read_trial(trial_paths(trial, tmp_path)[0])
    assert found.end["step"] == 20
    assert found.series("accuracy")[0] == [0, 20]
    assert EXPERIMENT.findings(Run(tmp_path, [found])).outcome == "unclear"  # of one arm
