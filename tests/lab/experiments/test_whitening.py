"""The verdict follows from the records; arms differ in their norm and rate alone."""

from pathlib import Path

import pytest
import torch

from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Trial
from normkit.lab.experiments.whitening import EXPERIMENT, NORMS, RATES, at_better_rate, is_dearer, is_faster
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}


def trial(arm, seed, risen_at=500, end=0.8, seconds=10.0, status="done"):
    """A trial that jumps to its last accuracy after some steps."""
    settings = {"rate": float(arm.rpartition("-")[2])}
    header = {"experiment": "whitening", "arm": arm, "seed": seed, "scale": "desk", "settings": settings}
    measured = [
        {"step": step, "seconds": seconds * step / 1000, "accuracy": end if step >= risen_at else 0.2, "loss": 0.5}
        for step in range(0, 1001, 50)
    ]
    return TrialRecord(
        Path(), header, measured, {"status": status, "step": 1000, "seconds": seconds} if status else None
    )


def run_of(*seeds, **newton):
    """Three seeds; newton as the keywords say in all of them, or as each dictionary says in one."""
    trials = []
    for seed, own in enumerate(seeds or ({},) * 3):
        for arm in EXPERIMENT.arms("desk"):
            is_newton, is_worse = arm.settings["norm"] == "newton", arm.settings["rate"] == RATES[0]
            of = ({"risen_at": 300, "seconds": 20.0} | newton | own) if is_newton else {}
            trials.append(trial(arm.name, seed, **({"end": 0.6} if is_worse else {}), **of))
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(risen_at=700), "contradicted"),
        (run_of(risen_at=500), "unclear"),  # as many steps
        (run_of({}, {}, {"risen_at": 700}), "unclear"),
        (run_of(seconds=13.0), "unclear"),
        (run_of(seconds=10.5), "contradicted"),
        (run_of({}, {"seconds": 10.5}, {}), "unclear"),
        (run_of(status="diverged"), "contradicted"),
        (run_of(status=None), "unclear"),
        (Run(Path(), [t for t in run_of().trials if t.arm != "zca-0.1"]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_each_norm_is_judged_at_the_rate_that_suits_it():
    trials = [trial("newton-0.03", 0, end=0.9), trial("newton-0.1", 0, end=0.5), trial("newton-0.1", 1, status=None)]
    assert {seed: t.arm for seed, t in at_better_rate(Run(Path(), trials), "newton").items()} == {0: "newton-0.03"}
    assert at_better_rate(Run(Path(), []), "newton") == {}


def test_parts_of_the_verdict():
    batch = trial("batch-0.1", 0)
    assert is_faster(trial("newton-0.1", 0, risen_at=450), batch) is True
    assert is_faster(trial("newton-0.1", 0, end=0.7), batch) is False  # never gets there
    assert is_faster(batch, batch) is None
    assert [is_dearer(trial("newton-0.1", 0, seconds=s), batch) for s in (15.0, 12.0, 9.0)] == [True, None, False]


def test_arms_start_from_the_same_weights():
    images = Classification(data.load("fashion-mini"))
    nets = [images.small_resnet(norm, 4) for norm in NORMS.values()]
    weights = [[p for p in net.parameters() if p.ndim > 1] for net in nets]
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
    assert {arm.settings["norm"] for arm in ARMS.values()} == set(NORMS)


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "newton-8-0.1"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    one = Trial("whitening", ARMS[name], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert found.end["step"] == 20
    assert_resumed_as_unbroken(EXPERIMENT, one, found, tmp_path / "resumed", steps=15)
