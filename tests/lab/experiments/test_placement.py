"""The verdict follows from the records, and norms stand where an arm says."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.placement import EXPERIMENT, PLACEMENTS, RATES, is_as_good, net
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from normkit.layers.batch import BatchNorm
from support.depth import thinned

ARMS = {arm.settings["placement"]: arm for arm in EXPERIMENT.arms("quick")}


def trial(place, rate, seed, end, status="done"):
    header = {"experiment": "placement", "arm": f"{place}-{rate}", "seed": seed, "scale": "desk"}
    header |= {"settings": {"rate": rate}, "parameters": 30_000 if place == "position" else 19_000}
    measured = [
        {"step": step, "seconds": 1.0, "accuracy": value, "loss": 0.5} for step, value in ((0, 0.1), (200, end))
    ]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(before=0.85, after=(0.85, 0.85, 0.85), position=(0.84, 0.84, 0.84), **others):
    """Three seeds; everything is better at the second rate."""
    ends = dict.fromkeys(PLACEMENTS, (0.8,) * 3) | {"before": (before,) * 3, "after": after, "position": position}
    trials = [
        trial(place, rate, seed, end - 0.05 * (rate == RATES[0]), **others)
        for place, of in ends.items()
        for rate in RATES
        for seed, end in enumerate(of)
    ]
    return Run(Path(), trials)


def without(run, arm):
    return Run(Path(), [trial for trial in run.trials if trial.arm != arm])


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),  # a tie, of which the reasons tell
        (run_of(after=(0.855, 0.845, 0.858)), "supported"),  # behind by less than the margin
        (run_of(after=(0.87, 0.84, 0.85)), "unclear"),  # seeds disagree
        (run_of(after=(0.87, 0.88, 0.865)), "contradicted"),
        (run_of(position=(0.87, 0.88, 0.865)), "contradicted"),
        (run_of(position=(0.87, 0.84, 0.84)), "unclear"),
        (run_of(status="diverged"), "unclear"),  # all are alike
        (run_of(status=None), "unclear"),
        (without(run_of(), "residual-pre-0.1"), "unclear"),
        (without(without(run_of(), "before-0.1"), "before-0.02"), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_margin():
    assert is_as_good([0.02, -0.009]) is True
    assert is_as_good([-0.02, -0.011]) is False
    assert is_as_good([-0.02, 0.02]) is None
    assert is_as_good([]) is None


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(0.86, after=(0.87, 0.865, 0.89)))
    ends, differences = findings.tables
    rows = {row[0]: row[1:] for row in ends.rows}
    assert rows["after"][:4] == [19_000, "82.00 (81.50 to 84.00)", "87.00 (86.50 to 89.00)", 0.1]
    assert ends.columns[-2] == "steps to 81.7%"
    assert (rows["after"][4], rows["none"][4]) == ("200 (200 to 200)", "never")
    assert differences.rows[1] == ["before - after", "-1.00 (-3.00 to -0.50)", "open"]
    assert [row[2] for row in differences.rows] == ["ahead", "open", "ahead", "even", "even", "behind"]
    assert "points, open; before 86.00 (86.00 to 86.00)%, after 87.00" in findings.reasons[0]
    assert "parameters: 19,000, 30,000" in findings.reasons[1]
    assert [curve.name for curve in findings.figures[0].curves] == ["none", "before", "after", "position"]
    assert findings.figures[0].curves[2].y == [0.1, 0.87]


def test_a_trial_that_diverged_counts_as_nothing():
    run = run_of()
    worse = [trial(*t.arm.rsplit("-", 1), t.seed, 0.9, "diverged") for t in run.of("before-0.1")]
    findings = EXPERIMENT.findings(Run(Path(), [*without(run, "before-0.1").trials, *worse]))
    assert "before 80.00" in findings.reasons[0]  # at the other rate


def built(place, shape=(1, 28, 28)):
    return net(ARMS[place].settings, shape, 10)


def norms(model):
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_nets_take_images_of_any_set(place, shape):
    model = built(place, shape)
    assert model(torch.randn(4, *shape)).shape == (4, 10)
    assert len(norms(model)) == (0 if "none" in place else 7)


def test_all_arms_start_from_the_same_weights():
    weights = []
    for arm in EXPERIMENT.arms("quick"):
        model = EXPERIMENT.training(Trial("placement", arm, 3, "quick", "fashion-mini")).model
        weights.append([m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
    assert len(weights) == 14
    assert len(weights[0]) == 8
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


def output_of(model, x):
    """What the second convolution gets, in training."""
    caught = []
    model.stages[0][0][0].layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    model(x)
    return caught[0]


def test_before_is_rectified_after_is_standardized():
    x = torch.randn(16, 1, 28, 28)
    before, after, position = (output_of(built(place), x) for place in ("before", "after", "position"))
    assert min(before.min(), position.min()) == 0 > after.min()
    torch.testing.assert_close(after.mean((0, 2, 3)), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(after.var((0, 2, 3), correction=0), torch.ones(8), atol=1e-3, rtol=0)


def test_biases_are_there_where_no_norm_follows_at_once():
    for place in PLACEMENTS:
        has_bias = {m.bias is not None for m in built(place).modules() if isinstance(m, nn.Conv2d)}
        assert has_bias == {place in ("none", "residual-none", "after")}


def test_per_position_has_parameters_for_every_position():
    shapes = [tuple(layer.weight.shape) for layer in norms(built("position", (3, 28, 30)))]
    assert shapes == [(8, 14, 15)] * 3 + [(16, 7, 8)] * 2 + [(32, 4, 4)] * 2
    assert {type(layer) for layer in norms(built("before"))} == {nk.BatchNorm2d}


@pytest.mark.parametrize("place", thinned(["after", "position"], ["position"].__contains__))
def test_a_quick_trial(place, tmp_path):
    trial = Trial("placement", ARMS[place], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path), lambda *step: None)
    run = read_run(tmp_path)
    (ended,) = run.trials
    assert ended.end["status"] == "done"
    assert ended.series("accuracy")[0] == [0, 20, 40, 60]
    assert ended.series("accuracy")[1][-1] > 0.4
    assert EXPERIMENT.findings(run).outcome == "unclear"


def test_the_rate_falls_to_nothing():
    training = EXPERIMENT.training(Trial("placement", ARMS["before"], 0, "quick", "fashion-mini"))
    assert [training.rate(step) for step in (0, 30, 60)] == [0.1, 0.05, 0.0]
