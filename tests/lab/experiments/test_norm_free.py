"""The verdict follows from the records; arms differ in what keeps a deep net trainable."""

from pathlib import Path

import pytest
import torch

from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Trial
from normkit.lab.experiments.norm_free import EXPERIMENT, JUDGED, RATES, ClippedSGD, best, net, sgd, trains
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
GOOD = {"plain": 0.1, "batch": 0.85, "fixup": 0.8, "scaled": 0.82, "scaled-clipped": 0.8}


def trial(arm, seed, end, status="done"):
    header = {"experiment": "norm-free", "arm": arm, "seed": seed, "scale": "desk", "settings": {}}
    measured = [{"step": step, "seconds": 1.0, "accuracy": end, "loss": 0.5} for step in (100, 200, 300)]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(*, seeds=3, status="done", only_at=None, **ends):
    """As good as can be, but for what is said: an accuracy for all seeds, or one for each."""
    trials = []
    for arm in EXPERIMENT.arms("desk"):
        kind, rate = arm.settings["kind"], arm.settings["rate"]
        for seed in range(seeds):
            end = ends.get(kind, GOOD[kind])
            end = end[seed] if isinstance(end, tuple) else end
            is_left_out = kind in JUDGED and only_at is not None and rate != only_at
            trials.append(trial(arm.name, seed, 0.1 if is_left_out else end, status))
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(only_at=0.01), "supported"),
        (run_of(plain=0.7), "contradicted"),
        (run_of(plain=(0.1, 0.1, 0.7)), "unclear"),
        (run_of(fixup=0.5), "unclear"),  # one of two
        (run_of(fixup=0.5, scaled=0.5), "contradicted"),
        (run_of(fixup=(0.5, 0.8, 0.8), scaled=(0.5, 0.8, 0.8)), "unclear"),
        (run_of(batch=0.1, **{"scaled-clipped": 0.1}), "supported"),  # which are not judged
        (run_of(status="diverged"), "contradicted"),
        (run_of(status=None), "unclear"),
        (Run(Path(), [t for t in run_of().trials if t.arm != "batch-0.1"]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_a_net_trains_at_the_rates_at_which_it_ends_well():
    trials = [trial(f"fixup-{rate}", 0, end) for rate, end in zip(RATES, (0.59, 0.6, 0.9), strict=True)]
    run = Run(Path(), [*trials, trial("fixup-0.01", 1, 0.9)])
    assert trains(run, "fixup") == {0: [0.03, 0.1]}  # the other seed has not ended at all rates
    assert best(run, "fixup") == [0.9, 0.9]


@pytest.fixture(scope="module")
def images():
    return Classification(data.load("fashion-mini"))


def test_plain_and_batch_start_from_the_same_weights(images):
    pair = [net(ARMS[f"{kind}-0.1"].settings, images, 5) for kind in ("plain", "batch")]
    weights = [[p for p in model.parameters() if p.ndim > 1] for model in pair]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_numbers_of_fixup_learn_slowly_and_all_parameters_learn_once(images):
    for name, arm in ARMS.items():
        model = net(arm.settings, images, 0)
        optimizer = sgd(model, arm.settings)
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
        assert len(grouped) == len(list(model.parameters()))
        slow = [p for group in optimizer.param_groups if group["lr"] < arm.settings["rate"] for p in group["params"]]
        assert ({p.numel() for p in slow} == {1}) == (arm.settings["kind"] == "fixup"), name
        assert isinstance(optimizer, ClippedSGD) == (arm.settings["clip"] is not None)


def test_clipped_gradients_are_short_against_their_weights(images):
    arm = ARMS["scaled-clipped-0.1"]
    model = net(arm.settings, images, 0)
    optimizer = sgd(model, arm.settings)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 100
    optimizer.step()
    kernel = model.stem[0].weight
    lengths = kernel.grad.flatten(1).norm(dim=1)
    assert (lengths < 10).all()
    assert model.classifier.weight.grad.norm() > 100


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "scaled-clipped-0.1"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    one = Trial("norm-free", ARMS[name], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert found.end["step"] == 10
    assert_resumed_as_unbroken(EXPERIMENT, one, found, tmp_path / "resumed", steps=5)
