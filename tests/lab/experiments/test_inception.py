"""The ratios are of steps seed by seed, the verdict follows from them, and arms differ in what they say."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments import inception
from normkit.lab.experiments.inception import (
    BASELINE,
    EXPERIMENT,
    NOT_AT_DESK,
    PLAIN,
    PLAIN_RATES,
    PLAIN_SIGMOID,
    PLAIN_X5,
    RATE,
    X5,
    X5_SIGMOID,
    X30,
    Protocol,
    best_of,
    decay_name,
    make_model,
    task_of,
    with_decays,
)
from normkit.lab.record import Run, TrialRecord, read_trial, without_times
from normkit.lab.trial import RunOptions, run_trial, trial_paths

STEPS = (100, 200, 300, 400)
# What each arm measures in a run that bears the claim out.
BORNE_OUT = {
    "inception-x0.1": (0.1, 0.2, 0.3, 0.4),
    "inception-x0.3": (0.2, 0.3, 0.4, 0.5),
    PLAIN: (0.3, 0.5, 0.6, 0.7),
    "inception-x3": (0.4, 0.6, 0.75, 0.74),
    PLAIN_X5: (0.1, 0.2, 0.2, 0.3),
    BASELINE: (0.5, 0.7, 0.75, 0.8),
    X5: (0.72, 0.8, 0.85, 0.85),
    X30: (0.6, 0.76, 0.8, 0.9),
    X5_SIGMOID: (0.3, 0.5, 0.6, 0.65),
    PLAIN_SIGMOID: (0.1, 0.1, 0.1, 0.1),
}
# What other decays are like: they change nothing.
BORNE_OUT |= {name: values for arm, values in BORNE_OUT.items() for name in with_decays([arm])}


def run_of(accuracies, seeds=2, status="done", scale="full"):
    settings = {arm.name: dict(arm.settings) for arm in EXPERIMENT.arms(scale)}
    trials = []
    for arm, values in accuracies.items():
        for seed in range(seeds):
            header = {"experiment": "inception", "arm": arm, "seed": seed, "scale": scale, "settings": settings[arm]}
            header["initial_rate"] = RATE * settings[arm]["times"]
            measured = [
                {"step": step, "seconds": step / 10, "accuracy": value + seed * 0.01}
                for step, value in zip(STEPS, values, strict=True)
            ]
            trials.append(TrialRecord(Path(), header, measured, {"status": status} if status else None))
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "supported"),
        ({PLAIN_X5: (0.3, 0.5, 0.6, 0.72)}, "unclear"),  # five times the rate does the plain net good
        ({PLAIN_SIGMOID: (0.3, 0.5, 0.6, 0.7)}, "unclear"),
        ({"inception-x3": (0.76, 0.76, 0.76, 0.76)}, "unclear"),  # at a rate of its own the plain net is sooner
        (dict.fromkeys(with_decays([X5]), (0.2, 0.3, 0.4, 0.5)), "contradicted"),
        ({X5: (0.2, 0.3, 0.4, 0.5)}, "unclear"),  # its decay ends its learning, and another does not
        (dict.fromkeys(with_decays([X5]), (0.72, 0.74, 0.74, 0.74)), "unclear"),  # by the paper's protocol only
        ({decay_name(X5, 1): (0.1, 0.1, 0.1, 0.1)}, "supported"),
        ({decay_name("inception-x3", 6): (0.76, 0.76, 0.76, 0.76)}, "unclear"),  # a decay that suits the plain net
        ({decay_name(PLAIN, 6): (0.1, 0.1, 0.1, 0.92)}, "unclear"),  # which ends higher than any with BN
    ],
)
def test_the_verdict(change, outcome):
    assert EXPERIMENT.findings(run_of(BORNE_OUT | change)).outcome == outcome


def test_before_the_end_there_is_no_verdict():
    assert EXPERIMENT.findings(run_of(BORNE_OUT, status=None)).outcome == "unclear"
    begun = {arm: values for arm, values in BORNE_OUT.items() if arm != X30}
    assert EXPERIMENT.findings(Run(Path(), run_of(begun).trials)).outcome == "unclear"


def test_steps_are_counted_to_the_plain_nets_best_with_the_same_seed():
    papers = Protocol(run_of(BORNE_OUT), PLAIN)
    assert papers.steps(PLAIN) == [400, 400]
    assert papers.steps(X5) == [100, 100]  # 0.73 for 0.71 with the other seed
    assert papers.ratios(X30) == [2, 2]
    assert papers.ratios(PLAIN_SIGMOID) == [None, None]
    assert papers.steps(BASELINE, below=0.2) == [100, 100]


def test_the_plain_nets_best_rate_is_taken():
    run = run_of(BORNE_OUT)
    assert best_of(run, PLAIN_RATES) == "inception-x3"
    assert Protocol(run, "inception-x3").ratios(X5) == [1.5, 1.5]  # 300 steps to 0.75, and 200


def test_tables_hold_the_measured_and_the_papers_numbers():
    papers, rates, decays = EXPERIMENT.findings(run_of(BORNE_OUT)).tables
    rows = {row[0]: row[1:] for row in papers.rows}
    assert rows[X5][:3] == [5 * RATE, "100 (100 to 100)", "4.0 (4.0 to 4.0)"]
    assert rows[X5][-2:] == [14.8, 73.0]
    assert [rows[arm][-2] for arm in (BASELINE, X30, X5_SIGMOID)] == [2.3, 11.5, None]
    assert {row[0] for row in rates.rows} == {arm.name for arm in EXPERIMENT.arms("quick")}
    assert [row[0] for row in decays.rows][:2] == ["inception-x3", BASELINE]
    assert {row[0] for row in decays.rows} >= {decay_name(X30, 1), decay_name(PLAIN, 6), X5_SIGMOID}


def test_each_net_is_taken_with_the_decay_that_suits_it():
    changed = {decay_name(X5, 1): (0.76, 0.8, 0.85, 0.85), decay_name(PLAIN, 3): (0.3, 0.5, 0.6, 0.77)}
    run = run_of(BORNE_OUT | changed)
    suited = Protocol(run, best_of(run, with_decays(PLAIN_RATES)))
    assert suited.reference == decay_name(PLAIN, 3)  # 0.77 after 400 steps
    assert (suited.soonest(X5), suited.ratios(suited.soonest(X5))) == (X5, [2, 2])
    assert Protocol(run, "inception-x3").soonest(X5) == decay_name(X5, 1)  # 0.75 after 100 steps
    assert suited.soonest(BASELINE) == BASELINE
    reason = next(text for text in EXPERIMENT.findings(run).reasons if text.startswith("Each with the decay"))
    assert "to that of inception-decay3, the best of all without BN: bn-baseline 1.0" in reason
    assert "bn-x5 2.0 (2.0 to 2.0), bn-x30 1.3 (1.3 to 1.3)" in reason


def test_other_decays_change_nothing_else():
    arms = {arm.name: arm.settings for arm in EXPERIMENT.arms("full")}
    assert list(arms)[:10] == [arm.name for arm in EXPERIMENT.arms("quick")]
    for arm in (PLAIN, "inception-x3", X5, X30, X5_SIGMOID):
        own, *others = with_decays([arm])
        assert {arms[name]["decay"] for name in (own, *others)} == {1, 3, 6}
        assert all(arms[name] | {"decay": arms[own]["decay"]} == arms[own] for name in others)
    assert len(arms) == 10 + 2 * 5


def test_at_a_desk_there_are_fewer_nets_and_every_sentence_has_its_own():
    arms = {arm.name: arm.settings for arm in EXPERIMENT.arms("full")}
    desk = {arm.name: arm.settings for arm in EXPERIMENT.arms("desk")}
    assert set(arms) - set(desk) == NOT_AT_DESK
    assert all(arms[name] == settings for name, settings in desk.items())
    assert {X5, X30, X5_SIGMOID} <= {name.removesuffix("-decay1") for name in desk if name.endswith("-decay1")}
    run = run_of({arm: values for arm, values in BORNE_OUT.items() if arm in desk}, scale="desk")
    findings = EXPERIMENT.findings(run)
    assert findings.outcome == "supported"
    assert "the best of 3 rates without BN" in findings.reasons[1]
    assert {row[0] for table in findings.tables for row in table.rows} == set(desk)
    assert all(curve.x for figure in findings.figures for curve in figure.curves)


def built(arm, seed=3):
    found = next(a for a in EXPERIMENT.arms("quick") if a.name == arm)
    trial = Trial("inception", found, seed, "quick", "fashion-mini")
    return make_model(found.settings, task_of(trial), seed)


def kinds(model):
    return {type(module) for module in model.modules()}


def test_arms_are_what_they_say():
    assert {nn.Dropout, nk.LocalResponseNorm, nn.ReLU} <= kinds(built(PLAIN))
    assert nk.BatchNorm2d not in kinds(built(PLAIN))
    assert {nn.Dropout, nk.LocalResponseNorm, nk.BatchNorm2d} <= kinds(built(BASELINE))
    assert not {nn.Dropout, nk.LocalResponseNorm} & kinds(built(X5))
    assert {nn.Sigmoid, nk.BatchNorm2d} <= kinds(built(X5_SIGMOID))
    assert nn.Sigmoid in kinds(built(PLAIN_SIGMOID))


def test_all_arms_start_from_the_same_weights():
    def weights(arm):
        return [p for name, p in built(arm).named_parameters() if name.endswith("layer.weight")]

    assert all(torch.equal(a, b) for a, b in zip(weights(PLAIN), weights(X30), strict=True))
    assert not torch.equal(weights(PLAIN)[0], next(built(PLAIN, seed=4).parameters()))


def test_the_rate_decays_and_six_times_faster_with_the_changes():
    rates = {}
    for arm in EXPERIMENT.arms("quick"):
        training = EXPERIMENT.training(Trial("inception", arm, 0, "quick", "fashion-mini"))
        rates[arm.name] = training.rate(0), training.rate(20)
    assert rates[PLAIN][0] == RATE
    assert rates[X30][0] == pytest.approx(30 * RATE)
    slow, fast = rates[PLAIN][1] / rates[PLAIN][0], rates[X5][1] / rates[X5][0]
    assert fast == pytest.approx(slow**6)


@pytest.mark.parametrize("name", [pytest.param(PLAIN, marks=pytest.mark.deep), X5])
def test_a_stopped_trial_is_resumed_to_the_same_record(name, tmp_path):
    arm = next(arm for arm in EXPERIMENT.arms("quick") if arm.name == name)
    trial = Trial("inception", arm, 1, "quick", "fashion-mini")

    def stop(step, *_):
        if step == 12:
            raise KeyboardInterrupt

    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "whole"), lambda *step: None)
    with pytest.raises(KeyboardInterrupt):
        run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "stopped"), stop)
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "stopped", resume=True), lambda *step: None)
    whole, stopped = (trial_paths(trial, tmp_path / which)[0] for which in ("whole", "stopped"))
    lines = [[without_times(json.loads(line)) for line in path.read_text().splitlines()] for path in (whole, stopped)]
    assert lines[0] == lines[1]
    assert read_trial(whole).end["step"] == training_steps(trial)


def training_steps(trial):
    return EXPERIMENT.training(trial).steps


@pytest.mark.deep
def test_large_images_go_to_the_papers_own_net_at_its_own_rate(tmp_path, monkeypatch):
    for split, count in (("train", 5), ("val", 2)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 256, (70, 90, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / split / label / f"{number}.png")
    monkeypatch.setitem(inception.LENGTHS, "quick", inception.Length(2, 2, 1, 6))
    monkeypatch.setattr(inception, "BATCH", 4)  # a step of 32 takes seconds
    arm = next(arm for arm in EXPERIMENT.arms("quick") if arm.name == PLAIN)
    trial = Trial("inception", arm, 0, "quick", str(tmp_path))
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "run"), lambda *step: None)
    record = read_trial(trial_paths(trial, tmp_path / "run")[0])
    assert record.header["initial_rate"] == 0.0015
    assert record.header["parameters"] > 8e6
    assert [line["step"] for line in record.measured] == [0, 2]
    assert EXPERIMENT.training(trial._replace(scale="full")).steps == 31_000_000
