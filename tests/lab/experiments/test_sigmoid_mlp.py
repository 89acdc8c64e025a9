"""The verdict follows from the records, and the paper's curves are the paper's."""

import math
from pathlib import Path

import pytest
import torch

from normkit.lab.data.transforms import binary
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.experiments.sigmoid_mlp import EXPERIMENT, published
from normkit.lab.record import Run, TrialRecord

STEPS = [0, 100, 200, 300]


def trial(arm, seed, accuracies, medians, data="fashion-mini", status="done"):
    """A record with three units, of which the last never moves."""
    header = {"experiment": "sigmoid-mlp", "arm": arm, "seed": seed, "scale": "quick", "data": data}
    measured = [
        {
            "step": step,
            "seconds": step / 10,
            "accuracy": accuracy,
            "quantiles": [[m - 1] * 2 + [0], [m] * 2 + [0], [m + 1] * 2 + [0]],
        }
        for step, accuracy, m in zip(STEPS, accuracies, medians, strict=True)
    ]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(plain, bn, data="fashion-mini", status="done", wander=(3.0, 0.5)):
    trials = [trial("plain", s, [0.1, *plain], [0, wander[0], 0, 0], data, status) for s in range(2)]
    trials += [trial("bn", s, [0.1, *bn], [0, wander[1], 0, 0], data, status) for s in range(2)]
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of([0.3, 0.5, 0.7], [0.6, 0.7, 0.8]), "supported"),
        (run_of([0.6, 0.7, 0.8], [0.3, 0.5, 0.7], wander=(0.5, 3.0)), "contradicted"),
        (run_of([0.3, 0.71, 0.7], [0.72, 0.7, 0.8]), "supported"),  # behind once, which is not what decides
        (run_of([0.3, 0.5, 0.7], [0.6, 0.7, 0.8], wander=(0.5, 3.0)), "unclear"),
        (run_of([0.3, 0.5, 0.7], [0.6, 0.7, 0.8], status=None), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of([0.90, 0.955, 0.965], [0.955, 0.962, 0.975], data="mnist"))
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert rows["95.0%"] == ["200 (200 to 200)", "100 (100 to 100)", 2.0]
    assert rows["96.0%"] == ["300 (300 to 300)", "200 (200 to 200)", 1.5]
    assert rows["97.0%"] == ["never", "300 (300 to 300)", None]
    assert "6.0 times less" in findings.reasons[3]
    assert findings.figures[0].curves[1].y == [0.1, 0.955, 0.962, 0.975]


def test_the_close_up_is_of_the_same_curves():
    whole, close, *_ = EXPERIMENT.findings(run_of([0.3, 0.77, 0.79], [0.6, 0.78, 0.8])).figures
    assert [curve.name for curve in close.curves] == [curve.name for curve in whole.curves]
    assert [list(curve.y) for curve in close.curves] == [[0.77, 0.79], [0.78, 0.8]]
    assert [list(curve.x) for curve in close.curves] == [[200, 300], [200, 300]]


def test_accuracy_is_shown_against_time_too():
    timed = EXPERIMENT.findings(run_of([0.3, 0.5, 0.7], [0.6, 0.7, 0.8])).figures[2]
    assert timed.x_title == "seconds of training"
    assert [list(curve.x) for curve in timed.curves] == [[0, 10, 20, 30]] * 2


def test_on_mnist_the_papers_curves_are_drawn_along():
    curves = EXPERIMENT.findings(run_of([0.3] * 3, [0.6] * 3, data="mnist")).figures[0].curves
    names = [(curve.name, curve.is_published) for curve in curves]
    assert names == [("plain", False), ("bn", False), ("plain", True), ("bn", True)]
    assert len(EXPERIMENT.findings(run_of([0.3] * 3, [0.6] * 3)).figures[0].curves) == 2


def near(curve, step):
    return min(zip(curve.x, curve.y, strict=True), key=lambda point: abs(point[0] - step))[1]


def test_the_papers_curves():
    plain, bn = published("a")
    assert near(plain, 5_000) == pytest.approx(0.784, abs=0.02)
    assert near(plain, 20_000) == pytest.approx(0.963, abs=0.002)
    assert bn.y[-1] == pytest.approx(0.9816, abs=1e-3)
    assert all(curve.is_published for curve in (plain, bn))
    assert [len(published(panel)) for panel in "abc"] == [2, 3, 3]


def test_images_are_on_or_off():
    pixels = torch.tensor([[[[0, 127], [128, 255]]]], dtype=torch.uint8)
    assert binary(pixels).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_both_arms_start_from_the_same_weights():
    weights = []
    for arm in experiment_named("sigmoid-mlp").arms("quick"):
        torch.manual_seed(3)
        model = EXPERIMENT.training(Trial("sigmoid-mlp", arm, 3, "quick", "fashion-mini")).model
        weights.append([p for name, p in model.named_parameters() if name.endswith("layer.weight")])
        assert math.isclose(float(weights[-1][0].detach().std()), arm.settings["std"], rel_tol=0.02)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
