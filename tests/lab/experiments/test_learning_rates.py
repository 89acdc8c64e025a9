"""The widths are those of the records, and so is the verdict."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.lab.experiment import Trial
from normkit.lab.experiments.learning_rates import BN, EXPERIMENT, PLAIN, RATES, SCALES, USUAL, of, reached
from normkit.lab.record import Run, TrialRecord, read_trial
from normkit.lab.trial import RunOptions, run_trial, trial_paths

ARMS = EXPERIMENT.arms("desk")
STEPS = ARMS[0].settings["steps"]


def record(arm, seed, accuracy, is_ended=True):
    """A trial that ended with this accuracy; None: its loss stopped being finite."""
    header = {"arm": arm.name, "seed": seed, "scale": "desk", "settings": arm.settings, "steps": STEPS}
    measured = [] if accuracy is None else [{"step": STEPS, "accuracy": accuracy}]
    return TrialRecord(Path(), header, measured, {"status": "done"} if is_ended else None)


def run_of(rates, scales, seeds=2, **options):
    """Between these ends, in half-decades, plain and BN reach 0.8; elsewhere they fail in one way or another."""

    def accuracy(settings):
        net = settings["net"] == BN
        halves = {key: round(2 * math.log10(settings[key])) for key in USUAL}
        for key, (low, high) in (("rate", rates[net]), ("scale", scales[net])):
            if halves[key] > high:
                return None
            if halves[key] < low:
                return 0.1
        return 0.8

    return Run(Path(), [record(arm, s, accuracy(arm.settings), **options) for s in range(seeds) for arm in ARMS])


NARROW, WIDE, CUT = (-4, -2), (-5, 1), (-9, -4)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of((NARROW, WIDE), ((-1, 0), (-6, 4))), "supported"),  # BN's range may go on beyond the grid
        (run_of((WIDE, NARROW), ((-5, 3), (-1, 1))), "contradicted"),
        (run_of((NARROW, NARROW), ((-1, 0), (-1, 0))), "contradicted"),  # not wider
        (run_of((NARROW, WIDE), ((-5, 3), (-1, 1))), "unclear"),
        (run_of((CUT, (-7, 3)), ((-1, 0), (-4, 4))), "unclear"),  # the plain net's range may be wider than the grid
        (run_of((WIDE, CUT), ((-5, 3), (-1, 1))), "unclear"),
        (run_of((NARROW, WIDE), ((-1, 0), (-6, 4)), is_ended=False), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of((NARROW, WIDE), ((-1, 0), (-6, 4))))
    ranges, rates, scales = (table.rows for table in findings.tables)
    assert ranges[0][2:] == ["0.01 to 0.1", "1.5 (1.5 to 1.5)", "1.5 (1.5 to 1.5)"]
    assert ranges[1][2:4] == ["0.00316 to 3.16", "3.5 (3.5 to 3.5)"]
    assert ranges[3][2:4] == ["0.001 to 100", "at least 5.5 (5.5 to 5.5)"]
    assert ["0.00316", "0.100 (0.100 to 0.100)", "0.800 (0.800 to 0.800)"] in rates
    assert ["316", "0.000 (0.000 to 0.000)", "0.000 (0.000 to 0.000)"] in scales
    assert "wider with BN in 2 of 2 seeds" in findings.reasons[0]
    assert "31.6 times as high with BN" in findings.reasons[2]


def test_the_level_is_half_of_the_seeds_best_and_gaps_are_left_out():
    rates = [arm for arm in ARMS if arm.settings["scale"] == 1.0]
    reach = {(PLAIN, of(-4)): 0.39, (PLAIN, of(-2)): 0.40, (BN, of(-4)): 0.8, (BN, of(-2)): 0.71, (BN, of(-3)): 0.39}
    run = Run(Path(), [record(a, 0, reach.get((a.settings["net"], a.settings["rate"]), 0.1)) for a in rates])
    plain, bn, *_ = EXPERIMENT.findings(run).tables[0].rows
    assert plain[2:] == ["0.1 to 0.1", "0.5", "0.0"]
    assert bn[2:] == ["0.01 to 0.1", "1.0", "0.5"]


def test_figures_have_a_point_for_each_of_the_grid_and_a_logarithmic_axis():
    figures = EXPERIMENT.findings(run_of((NARROW, WIDE), ((-1, 0), (-6, 4)))).figures
    assert [figure.log_x for figure in figures] == [True, True]
    for figure, grid in zip(figures, (RATES["desk"], SCALES["desk"]), strict=True):
        assert [curve.x for curve in figure.curves] == [[of(e) for e in grid]] * 2
        assert all(len(curve.low) == len(curve.high) == len(grid) for curve in figure.curves)


def test_a_run_under_way_has_findings():
    trials = run_of((NARROW, WIDE), ((-1, 0), (-6, 4))).trials
    begun = record(ARMS[0], 0, None, is_ended=False)
    for some in ([begun], trials[:1], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def test_an_accuracy_counts_after_the_last_step_alone():
    trial = record(ARMS[0], 0, 0.7)
    assert reached(trial) == 0.7
    trial.measured[0]["step"] = STEPS - 1  # the loss was finite up to there
    assert reached(trial) == 0.0


@pytest.mark.parametrize("scale", ["quick", "desk", "full"])
def test_each_point_is_run_once_and_both_grids_meet_in_one(scale):
    settings = [arm.settings for arm in EXPERIMENT.arms(scale)]
    points = [(s["net"], s["rate"], s["scale"]) for s in settings]
    assert len(set(points)) == len(points) == 2 * (len(RATES[scale]) + len(SCALES[scale]) - 1)
    assert {(net, USUAL["rate"], USUAL["scale"]) for net in (PLAIN, BN)} <= set(points)
    assert len({arm.name for arm in EXPERIMENT.arms(scale)}) == len(points)


def test_arms_are_what_their_settings_say():
    weights = []
    for name in ("plain-scale-10", "bn-scale-10", "bn-rate-0.0316"):
        arm = next(arm for arm in ARMS if arm.name == name)
        torch.manual_seed(5)
        training = EXPERIMENT.training(Trial("learning-rates", arm, 5, "desk", "fashion-mini"))
        linear = [module for module in training.model.modules() if isinstance(module, nn.Linear)]
        norms = [module for module in training.model.modules() if isinstance(module, nn.BatchNorm1d)]
        assert len(norms) == (5 if name.startswith("bn") else 0)
        assert [layer.bias is None for layer in linear] == [bool(norms)] * 5 + [False]
        assert training.optimizer.param_groups[0]["lr"] == arm.settings["rate"] == 0.0316
        weights.append([layer.weight.detach() for layer in linear])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert all(torch.allclose(a, 10 * b) for a, b in zip(weights[1], weights[2], strict=True))
    assert float(weights[2][1].std()) == pytest.approx(math.sqrt(2 / 100), rel=0.03)


@pytest.mark.parametrize(("name", "trains"), [("bn-rate-0.316", True), ("plain-rate-0.316", False)])
def test_a_trial_runs(name, trains, tmp_path):
    arm = next(arm for arm in EXPERIMENT.arms("quick") if arm.name == name)
    trial = Trial("learning-rates", arm, 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path), lambda *step: None)
    found = read_trial(trial_paths(trial, tmp_path)[0])
    assert found.end["status"] == ("done" if trains else "diverged")
    assert (reached(found) > 0.4) == trains
