"""The verdict follows from the records; arms differ in their norm and batch alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Trial
from normkit.lab.experiments.small_batch import (
    EXAMPLES,
    EXPERIMENT,
    GHOST,
    NORMS,
    SIZES,
    Centred,
    batch_norm_rises,
    group_norm_does_not,
    net,
    rises_of,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}


def trial(arm, seed, end, status="done", population=None):
    header = {"experiment": "small-batch", "arm": arm, "seed": seed, "scale": "desk", "settings": {}}
    line = {"step": 100, "seconds": 1.0, "accuracy": end, "loss": 0.5}
    line |= {"population": end if population is None else population} if arm.startswith("batch") else {}
    return TrialRecord(Path(), header, [line], {"status": status} if status else None)


def run_of(batch=0.1, group=0.0, lead=0.05, status="done", left_out=None):
    """Three seeds of all arms; the accuracies that the two judged norms lose to the smallest batch, maybe by seed."""
    small, trials = SIZES["desk"][-1], []
    for arm in EXPERIMENT.arms("desk"):
        for seed in range(3):
            lost = {"batch": batch, "group": group}.get(arm.settings["norm"], 0.02)
            lost = lost[seed] if isinstance(lost, tuple) else lost
            end = 0.85 - (lost if arm.settings["of"] == small else 0.0)
            if arm.name == f"group-{small}":
                end = end + lead - 0.05
            if arm.name != left_out:
                trials.append(trial(arm.name, seed, end, status))
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(batch=(0.1, 0.03, 0.2)), "supported"),
        (run_of(batch=0.01), "unclear"),  # less than the margin
        (run_of(batch=(0.1, 0.1, 0.01)), "unclear"),
        (run_of(batch=-0.01, group=-0.05), "contradicted"),  # no rise
        (run_of(group=0.1), "contradicted"),  # rises as much, and errs as much
        (run_of(group=0.06), "unclear"),  # more than half as much
        (run_of(batch=0.3, group=0.03), "unclear"),  # more than the margin
        (run_of(lead=-0.1), "contradicted"),  # flat, and worse all the same
        (run_of(status="diverged"), "contradicted"),  # nothing rises
        (run_of(status=None), "unclear"),
        (run_of(left_out="renorm-8"), "unclear"),
        (run_of(left_out="batch-2"), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_parts_of_the_verdict():
    assert [batch_norm_rises(rise) for rise in (0.03, 0.01, 0.0, -0.1)] == [True, None, False, False]
    found = [group_norm_does_not(*of) for of in ((0.01, 0.1), (-0.01, 0.1), (0.01, 0.015), (0.03, 0.2), (0.1, 0.1))]
    assert found == [True, True, None, None, False]


def test_rises_are_seed_by_seed_and_a_divergence_errs_always():
    trials = [trial("batch-32", 0, 0.8), trial("batch-2", 0, 0.7), trial("batch-32", 1, 0.8)]
    trials += [trial("batch-2", 2, 0.7), trial("batch-32", 3, 0.75), trial("batch-2", 3, 0.1, "diverged")]
    assert rises_of(Run(Path(), trials), "batch", (32, 2)) == pytest.approx({0: 0.1, 3: 0.75})


def test_a_ghost_of_one_chunk_is_batch_norm():
    trials = [trial("batch-32", 0, 0.8), trial("ghost-2", 0, 0.75)]
    assert rises_of(Run(Path(), trials), GHOST, (32, 2)) == pytest.approx({0: 0.05})


def test_at_equal_steps_the_ghost_says_what_statistics_cost():
    findings = EXPERIMENT.findings(run_of())
    assert "of 2 (ghost), BN's error rises by 2.0 (2.0 to 2.0) points" in findings.reasons[3]
    drawn = [{curve.name: (curve.x, curve.y) for curve in figure.curves} for figure in findings.figures]
    assert drawn[0] == {
        "batch": ([2, 8, 32], pytest.approx([0.17, 0.15, 0.15])),
        "group": ([2, 8, 32], pytest.approx([0.15, 0.15, 0.15])),
    }
    assert drawn[1]["batch"] == ([2, 8, 32], pytest.approx([0.25, 0.15, 0.15]))
    assert [list(of) for of in drawn[1:]] == [["batch", "group", "renorm", "moving"], ["layer", "instance", "frozen"]]


def test_all_arms_see_as_many_examples_and_rates_go_by_the_batch():
    for scale, sizes in SIZES.items():
        arms = EXPERIMENT.arms(scale)
        assert {arm.settings["steps"] * arm.settings["batch"] for arm in arms} == {EXAMPLES[scale]}
        assert len({arm.settings["rate"] / arm.settings["batch"] for arm in arms}) == 1
        assert len(arms) == len(NORMS) * len(sizes) + len(sizes) - 1
        assert all(sizes[0] % size == 0 for size in sizes)


@pytest.fixture(scope="module")
def images():
    return Classification(data.load("fashion-mini"))


def built(name, images, seed=3):
    return net(ARMS[name].settings, images, seed, [torch.randn(8, 1, 28, 28) for _ in range(2)])


@pytest.mark.parametrize("name", ARMS)
def test_weights_depend_on_the_seed_alone(name, images):
    weights = [m.weight for m in built(name, images).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    others = [m.weight for m in built("batch-8", images).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    if name.startswith("moving"):
        others = [Centred()(w) if w.ndim == 4 else w for w in others]
    assert len(weights) == 8
    for mine, theirs in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_norms_are_what_the_arm_says(images):
    def kinds(name):
        norms = (nk.BatchNorm2d, nk.GroupNorm, nk.InstanceNorm2d, nk.BatchRenorm2d, nk.MovingBatchNorm2d)
        norms += (nk.FrozenBatchNorm2d, nk.GhostBatchNorm2d)
        return [m for m in built(name, images).modules() if isinstance(m, norms)]

    assert {len(kinds(name)) for name in ARMS} == {7}
    assert {m.num_groups for m in kinds("group-2")} == {4}
    assert {m.num_groups for m in kinds("layer-2")} == {1}
    assert {m.buffer_size for m in kinds("moving-2")} == {4}
    assert {m.chunk_size for m in kinds("ghost-2")} == {2}
    assert all(type(m) is nk.FrozenBatchNorm2d and m.running_mean.abs().max() > 0 for m in kinds("frozen-2"))
    assert all(m.weight.requires_grad for m in kinds("frozen-2"))


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "moving-8"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    trial = Trial("small-batch", ARMS[name], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert found.end["step"] == ARMS[name].settings["steps"]
    assert ("population" in found.measured[-1]) == name.startswith("batch")
    assert_resumed_as_unbroken(EXPERIMENT, trial, found, tmp_path / "resumed", steps=25)
