"""Factors and bands are those of the records, and all arms are measured over the same lengths."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments import landscape
from normkit.lab.experiments.landscape import EXPERIMENT
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("desk")}
QUICK = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
BEST = {"plain-0.03": 0.7, "plain-0.1": 0.8, "plain-0.3": 0.75, "bn-0.03": 0.8, "bn-0.1": 0.85, "bn-0.3": 0.86}
PLAIN = (1.0, 4.0, 10.0)  # loss variation, greatest change, smoothness


def record(arm, seed, properties, end, status="done"):
    header = {"experiment": "landscape", "arm": arm, "seed": seed, "scale": "desk"}
    variation, change, smoothness = properties
    measured = [{"step": 0, "loss": None, "accuracy": 0.1}]
    for step, times in ((50, 100.0), (100, 1.0), (150, 1.0)):
        reading = {"step": step - 1, "probe": "Landscape", "layer": "", "loss": 2.0, "loss_low": 1.5}
        reading |= {"loss_high": 1.5 + variation * times, "gradient": 2.0, "change_low": change * times / 2}
        reading |= {"change_high": change * times, "smoothness": smoothness * times}
        measured.append({"step": step, "loss": 9.0, "accuracy": end, "probes": [reading]})
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def scaled(factors):
    return tuple(n * factor for n, factor in zip(PLAIN, factors, strict=True))


def run_of(usual, fast=None, status="done"):
    """Factors of BN over plain, for each seed, at all rates, or with others at 0.3, which is BN's best."""
    trials = []
    for arm, end in BEST.items():
        of = fast if fast and arm == "bn-0.3" else usual
        for seed, factors in enumerate(of):
            trials.append(record(arm, seed, scaled(factors) if arm.startswith("bn") else PLAIN, end, status))
    return Run(Path(), trials)


def with_diverged(run, arm):
    return Run(Path(), [record(t.arm, t.seed, PLAIN, 0.9, "diverged") if t.arm == arm else t for t in run.trials])


BETTER, WORSE, ONE_BETTER = (0.2, 0.5, 0.89), (2.0, 1.1, 0.91), (0.2, 1.1, 1.2)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of([BETTER] * 3), "supported"),
        (run_of([WORSE] * 3), "contradicted"),
        (run_of([ONE_BETTER] * 3), "unclear"),
        (run_of([BETTER, BETTER, WORSE]), "unclear"),
        (run_of([BETTER] * 3, fast=[WORSE] * 3), "unclear"),  # support needs the best rates too
        (run_of([WORSE] * 3, fast=[BETTER] * 3), "contradicted"),
        (with_diverged(run_of([BETTER] * 3), "plain-0.3"), "supported"),  # it was not the best
        (with_diverged(run_of([BETTER] * 3), "plain-0.1"), "unclear"),
        (run_of([BETTER] * 3, status=None), "unclear"),
        (Run(Path(), [t for t in run_of([BETTER] * 3).trials if t.arm != "bn-0.03"]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(
        run_of([(0.2, 0.5, 0.8), (0.3, 0.5, 0.8), (0.1, 0.5, 0.8)], fast=[(3.0, 4.0, 5.0)] * 3)
    )
    factors, arms = findings.tables
    assert factors.columns[2:] == [
        "at the paper's rate (plain 0.1, bn 0.1)",
        "each at its best rate (plain 0.1, bn 0.3)",
    ]
    assert factors.rows[0][2:] == ["0.200 (0.100 to 0.300)", "3.000 (3.000 to 3.000)"]
    assert [row[3] for row in factors.rows] == [f"{n}.000 ({n}.000 to {n}.000)" for n in (3, 4, 5)]
    rows = {tuple(row[:2]): row[2:] for row in arms.rows}
    assert rows["plain", 0.1][0] == "80.00 (80.00 to 80.00)"
    assert [cell.split()[0] for cell in rows["plain", 0.1][1:]] == ["1.000", "4.000", "10.000", "2.000", "2.000"]
    assert "loss variation 0.20 (0.10 to 0.30) times the plain net's" in findings.reasons[0]


def test_bands_are_along_the_gradient():
    loss, change, smooth = EXPERIMENT.findings(run_of([(0.2, 0.5, 0.8), (0.4, 0.5, 0.8), (0.3, 0.5, 0.8)])).figures
    plain, bn = loss.curves
    assert (bn.x, bn.y, bn.low) == ([50.0, 100.0, 150.0], [2.0] * 3, [1.5] * 3)  # not the mean loss of training
    assert bn.high == pytest.approx([31.5, 1.8, 1.8])
    assert (plain.high[1], change.curves[0].low[1], change.curves[0].high[1]) == (2.5, 2.0, 4.0)
    assert change.curves[1].y == pytest.approx([150.0, 1.5, 1.5])
    assert smooth.curves[1].y == pytest.approx([800.0, 8.0, 8.0])


def test_a_run_under_way_has_findings():
    trials = run_of([BETTER] * 2).trials
    for some in (trials[:1], trials[-1:], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def test_nets_differ_in_norms_and_rates_alone():
    weights = []
    for arm in (ARMS["plain-0.03"], ARMS["bn-0.3"]):
        training = EXPERIMENT.training(Trial("landscape", arm, 3, "desk", "fashion-mini"))
        norms = [m for m in training.model.modules() if isinstance(m, nk.BatchNorm2d)]
        assert len(norms) == (8 if arm.name.startswith("bn") else 0)
        assert training.optimizer.param_groups[0]["lr"] == float(arm.name.split("-")[1])
        weights.append([m.weight for m in training.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def run_quick(arm, directory, **settings):
    arm = arm._replace(settings=arm.settings | settings)
    trial = Trial("landscape", arm, 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(directory), lambda *step: None)
    return read_run(directory)


def test_arms_of_all_rates_are_measured_over_the_same_lengths(tmp_path, monkeypatch):
    monkeypatch.setitem(landscape.EVERY, "quick", 1)  # from the same weights
    readings = []
    for rate in (0.1, 0.3):
        (trial,) = run_quick(QUICK["bn-0.1"], tmp_path / str(rate), rate=rate, steps=1).trials
        readings.append(trial.measured[1]["probes"])
    assert readings[0] == readings[1]
    (reading,) = readings[0]
    assert reading["loss_low"] < reading["loss_high"]
    # The change cannot exceed the smoothness over the longest way.
    assert reading["change_high"] <= reading["smoothness"] * 0.4 * reading["gradient"] * 1.0001


def test_quick_trials_have_findings(tmp_path):
    for arm in QUICK.values():
        run = run_quick(arm, tmp_path)
    findings = EXPERIMENT.findings(run)
    for trial in run.trials:
        assert [len(line["probes"]) for line in trial.measured[1:]] == [1, 1]
    assert all(len(curve.y) == 2 for figure in findings.figures for curve in figure.curves)
    assert [row[:2] for row in findings.tables[1].rows] == [["plain", 0.1], ["bn", 0.1]]
