"""Shifts are compared as the records have them, in nets that differ in their norms alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.covariate_shift import EXPERIMENT, linear_batches
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("desk")}
QUICK = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
PAIRS = ("vgg-{}-0.1", "vgg-{}-0.01", "linear-{}-1e-06", "linear-{}-1e-07")


def record(arm, seed, relative, status="done"):
    """Two layers at two steps, whose median is `relative`."""
    header = {"experiment": "covariate-shift", "arm": arm, "seed": seed, "scale": "desk"}
    measured = [{"step": 0, "loss": None}]
    for step, times in ((75, (0.5, 1.0)), (150, (1.0, 30.0))):
        shifts = [{"relative": relative * n, "cosine": 1 - relative * n / 10, "shift": 7.0} for n in times]
        readings = [{"step": step - 1, "probe": "CovariateShift", "layer": str(i)} | s for i, s in enumerate(shifts)]
        measured.append({"step": step, "loss": 1000.0 / step, "probes": readings})
    for line in measured:
        line |= {"accuracy": 0.8} if arm.startswith("vgg") else {}
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(factors=(2.0, 2.0, 2.0), status="done", **others):
    """Three seeds, in which BN's shift is so many times the plain net's; others by the start of the pair's name."""
    trials = []
    for pair in PAIRS:
        times = others.get(pair.split("-")[0], factors)
        for seed, factor in enumerate(times):
            trials += [record(pair.format("plain"), seed, 0.2, status)]
            trials += [record(pair.format("bn"), seed, 0.2 * factor, status)]
    return Run(Path(), trials)


def with_diverged(run, arm):
    return Run(Path(), [record(t.arm, t.seed, 0.2, "diverged") if t.arm == arm else t for t in run.trials])


def without(run, arm):
    return Run(Path(), [trial for trial in run.trials if trial.arm != arm])


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of((0.5, 0.8, 0.89)), "supported"),
        (run_of((2.0, 1.1, 0.91)), "contradicted"),  # similar is not smaller
        (run_of((0.5, 0.5, 1.2)), "unclear"),  # seeds disagree
        (run_of((0.5, 0.5, 0.5), linear=(3.0, 3.0, 3.0)), "unclear"),  # nets disagree
        (with_diverged(run_of((0.5, 0.5, 0.5)), "vgg-plain-0.1"), "unclear"),
        (with_diverged(run_of(), "linear-bn-1e-06"), "unclear"),
        (without(run_of(), "vgg-bn-0.01"), "unclear"),
        (run_of(status=None), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of((0.5, 2.0, 3.0)))
    (table,) = findings.tables
    rows = {tuple(row[:2]): row[2:] for row in table.rows}
    assert len(rows) == 8
    assert rows["vgg at 0.1", "plain"][:2] == ["0.200 (0.200 to 0.200)", "0.980 (0.980 to 0.980)"]
    assert rows["vgg at 0.1", "bn"][0] == "0.400 (0.100 to 0.600)"
    assert rows["vgg at 0.01", "bn"][2:] == ["7.000 (7.000 to 7.000)", "0.800 (0.800 to 0.800)"]
    assert rows["linear at 1e-06", "bn"][3] == "7 (7 to 7)"  # the loss after 150 steps
    assert "a factor of 2.00 (0.50 to 3.00); smaller in 1 of 3 seeds" in findings.reasons[0]
    assert "Loss at the end 7 (7 to 7) with BN" in findings.reasons[3]
    shifts = findings.figures[0].curves
    assert [curve.name for curve in shifts] == ["vgg-plain-0.1", "vgg-bn-0.1", "vgg-plain-0.01", "vgg-bn-0.01"]
    assert shifts[0].x == [75.0, 150.0]
    assert shifts[0].y == pytest.approx([0.15, 3.1])  # medians over layers
    assert findings.figures[5].curves[0].y == pytest.approx([1000 / 75, 1000 / 150])


def test_a_seed_with_a_diverged_net_has_no_factor():
    findings = EXPERIMENT.findings(with_diverged(run_of(), "vgg-plain-0.1"))
    assert "a factor of -; smaller in 0 of 3 seeds" in findings.reasons[0]


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    for some in (trials[:1], trials[1:2], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def training_of(name, seed=4, arms=ARMS):
    torch.manual_seed(seed)
    return EXPERIMENT.training(Trial("covariate-shift", arms[name], seed, "desk", "fashion-mini"))


def weighted(model):
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize(("pair", "layers"), [("vgg-{}-0.1", 9), ("linear-{}-1e-07", 25)])
def test_two_nets_differ_in_norms_alone(pair, layers):
    plain, bn = (training_of(pair.format(norm)) for norm in ("plain", "bn"))
    ours, theirs = weighted(plain.model), weighted(bn.model)
    assert len(ours) == layers
    assert all(torch.equal(a.weight, b.weight) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    count = [sum(isinstance(m, nk.BatchNorm1d | nk.BatchNorm2d) for m in t.model.modules()) for t in (plain, bn)]
    assert count == [0, layers - 1]
    for one, other in zip(next(plain.batches(0)), next(bn.batches(0)), strict=True):
        assert torch.equal(one, other)
    assert plain.optimizer.param_groups[0]["lr"] == float(pair.split("-", 2)[2])


def test_the_linear_net_is_to_learn_a_matrix():
    batches = linear_batches(50, 10, seed=2)
    x, y = next(batches)
    matrix = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(x @ matrix, y, rtol=1e-4, atol=1e-4)
    assert torch.equal(next(batches)[0], x)
    assert not torch.equal(next(linear_batches(50, 10, seed=3))[0], x)
    loss = training_of("linear-plain-1e-06").loss
    assert float(loss(torch.full((3, 2), 2.0), torch.zeros(3, 2))) == 24.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for arm in QUICK.values():
        trial = Trial("covariate-shift", arm, 0, "quick", "fashion-mini")
        run_trial(EXPERIMENT, trial, RunOptions(directory), lambda *step: None)
    return read_run(directory)


@pytest.mark.parametrize("name", QUICK)
def test_every_layer_but_the_first_is_measured_at_every_evaluation(name, run):
    (trial,) = run.of(name)
    names = [layer for layer, _ in weighted(training_of(name, arms=QUICK).model)]
    assert [line["step"] for line in trial.measured] == [0, 6, 12]
    for line in trial.measured[1:]:
        assert [reading["layer"] for reading in line["probes"]] == names[1:]
        assert all(reading["shift"] > 0 and -1 <= reading["cosine"] <= 1.0001 for reading in line["probes"])


def test_a_quick_run_has_findings(run):
    findings = EXPERIMENT.findings(run)
    assert [row[:2] for row in findings.tables[0].rows] == [
        ["vgg at 0.1", "plain"],
        ["vgg at 0.1", "bn"],
        ["linear at 1e-06", "plain"],
        ["linear at 1e-06", "bn"],
    ]
    assert all(len(curve.y) >= 2 for figure in findings.figures for curve in figure.curves)


@pytest.mark.parametrize("name", ["vgg-bn-0.1", "linear-bn-1e-06"])
def test_interrupted_and_resumed_it_has_the_unbroken_record(name, run, tmp_path):
    trial = Trial("covariate-shift", QUICK[name], 0, "quick", "fashion-mini")
    assert_resumed_as_unbroken(EXPERIMENT, trial, run.of(name)[0], tmp_path)
