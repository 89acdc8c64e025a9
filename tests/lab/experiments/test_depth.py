"""The verdict follows from the factors of nets; arms differ in build, depth, first weights and norm alone."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Trial
from normkit.lab.experiments.depth import (
    BN,
    DEPTHS,
    EXPERIMENT,
    NONE,
    RATES,
    SIGMA,
    SIZES,
    Net,
    comes_to_the_papers,
    deep_and_shallow,
    factors,
    gaussian_and_he,
    measured_at,
    net,
    nets,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
NEVER, NEITHER = 0.0, None


def trial(of, norm, seed, at, top=0.8, status="done"):
    """A race that is at its top from a step on, tested every 10 steps; without that step it does not train."""
    header = {"experiment": "depth", "arm": of.arm(norm), "seed": seed, "scale": "desk", "settings": of._asdict()}
    measured = []
    for step in range(10, 401, 10):
        value = top if at is not None and step >= at else 0.1
        line = {"step": step, "seconds": 1.0, "loss": 1.0, "accuracy": value}
        measured.append(line | {"accuracies": {"0.03": value - 0.02, "0.1 decayed": value}})
    return TrialRecord(Path(), header, measured, {"status": status, "step": 400} if status else None)


def pair(of, seed, factor, status="done"):
    """The races of a net that have this factor: without BN it takes 280 steps."""
    without, bn = 280, 280 / factor if factor else None
    if factor == math.inf:
        without, bn = None, 20
    if factor is NEITHER:
        without = None
    top = 0.7 if factor == NEVER else 0.8
    return [trial(of, NONE, seed, without, status=status), trial(of, BN, seed, 20 if factor == NEVER else bn, top)]


def good(of, seed):
    """The claim, borne out: deeper nets have larger factors, and so have Gaussian weights."""
    depth = sorted(DEPTHS["desk"][of.family]).index(of.depth)
    if of.weights == "gaussian":
        return (4.0, 7.0, 14.0, math.inf)[depth]
    return (1.0, 2.0, 4.0, 7.0)[depth]


def run_of(factor=good, seeds=3, status="done"):
    trials = [t for of in nets("desk") for seed in range(seeds) for t in pair(of, seed, factor(of, seed), status)]
    return Run(Path(), trials)


def with_factor(choose, factor):
    """As good as can be, but for the nets and seeds that are chosen."""
    return run_of(lambda of, seed: factor if choose(of, seed) else good(of, seed))


def without(run, arm, seed=0):
    return Run(Path(), [t for t in run.trials if (t.arm, t.seed) != (arm, seed)])


def is_deepest(of):
    return of.depth == DEPTHS["desk"][of.family][-1]


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(seeds=1), "supported"),
        (run_of(lambda of, seed: 2.0), "contradicted"),
        (with_factor(lambda of, seed: is_deepest(of), 1.0), "contradicted"),  # (a) no row rises
        (with_factor(lambda of, seed: is_deepest(of) and seed == 1, 1.0), "unclear"),
        (with_factor(lambda of, seed: is_deepest(of) and of.family == "plain", 1.0), "supported"),  # 4 rows of 6
        (with_factor(lambda of, seed: is_deepest(of) and of.weights == "he", 1.0), "unclear"),  # 3 rows of 6
        (with_factor(lambda of, seed: of.weights == "gaussian", NEVER), "contradicted"),  # (b) and (c)
        (with_factor(lambda of, seed: of.weights == "gaussian", math.inf), "supported"),
        (with_factor(lambda of, seed: of.weights == "he" and seed == 2, 28.0), "unclear"),
        (with_factor(lambda of, seed: good(of, seed) >= 14, 10.0), "contradicted"),  # (c) no 14
        (with_factor(lambda of, seed: good(of, seed) >= 14 and seed == 0, 10.0), "unclear"),
        (with_factor(lambda of, seed: of.family == "inception" and good(of, seed) >= 14, 10.0), "contradicted"),
        (run_of(lambda of, seed: math.inf), "unclear"),  # nothing can be compared
        (run_of(lambda of, seed: NEITHER), "unclear"),
        (run_of(status="diverged"), "supported"),  # after it had got there
        (run_of(status=None), "unclear"),
        (without(run_of(), "inception-6-he-bn"), "unclear"),
        (without(run_of(), "plain-20-gaussian-none"), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 7.0, 14.0, 28.0, math.inf, NEVER, NEITHER])
def test_a_factor_is_of_the_races_with_the_same_seed(factor):
    of = Net("residual", 20, "he")
    run = Run(Path(), [*pair(of, 0, factor), *pair(of, 2, 2.0), trial(of, BN, 1, 20)])
    assert factors(run, of) == {0: factor, 2: 2.0}


def test_the_papers_factor_is_looked_for_among_inceptions():
    found = {Net("inception", 6, "he"): {0: 2.0, 1: 13.9}, Net("inception", 34, "he"): {0: 14.0, 1: None}}
    found[Net("plain", 56, "he")] = {0: 2.0, 1: 20.0, 2: 20.0}
    assert [comes_to_the_papers(found, seed) for seed in (0, 1, 2)] == [True, False, None]


def test_the_numbers_are_those_of_the_records():
    of = Net("inception", 34, "gaussian")
    findings = EXPERIMENT.findings(with_factor(lambda other, seed: other == of and seed == 2, 28.0))
    rows = {tuple(row[:3]): row[3:] for row in findings.tables[0].rows}
    assert list(rows) == nets("desk")
    assert rows["inception", 18, "gaussian"] == [
        *["80.0 (80.0 to 80.0)"] * 2,
        "280 (280 to 280)",
        "20 (20 to 20)",
        *["14.0 (14.0 to 14.0)"] * 2,
        "0.0 (0.0 to 0.0)",
        *["0.1 decayed"] * 2,
    ]
    assert rows["inception", 34, "gaussian"][4] == "28.0; only BN trains in 2 of 3"
    assert "In 18 of 18 rows and seeds" in findings.reasons[0]
    ends = "from he weights 1.0 (1.0 to 1.0) with 6 modules, and 7.0 (7.0 to 7.0) with 34;"
    assert f"Inception's: {ends} from gaussian" in findings.reasons[0]
    assert "In 30 of 30 nets and seeds" in findings.reasons[1]
    there = "18 modules from gaussian weights (14.0 (14.0 to 14.0)), 34 modules from gaussian weights (28.0; only BN"
    assert f"in every seed: {there} trains in 2 of 3). The largest" in findings.reasons[2]
    assert findings.reasons[2].endswith("in every seed: 18 modules from gaussian weights (14.0 (14.0 to 14.0)).")
    assert "Without BN 58 of 60 nets and seeds train" in findings.reasons[3]
    first = {curve.name: curve for curve in findings.figures[0].curves}
    assert (first["he"].x, first["he"].y) == ([6, 10, 18, 34], [1.0, 2.0, 4.0, 7.0])
    assert (first["gaussian"].x, first["gaussian"].low) == ([6, 10, 18, 34], [4.0, 7.0, 14.0, 28.0])
    assert first["gaussian"].high == [4.0, 7.0, 14.0, 32.0]  # where only BN trains
    assert first["gaussian"].y[-1] == 32.0
    assert (first["paper"].y, first["paper"].is_published) == ([14.0, 14.0], True)
    by_depth = {curve.name: curve for curve in findings.figures[3].curves}
    assert by_depth["gaussian, none"].low == [0.8, 0.8, 0.8, 0.1]


def test_where_no_inception_has_the_papers_factor_this_is_said():
    reason = EXPERIMENT.findings(run_of(lambda of, seed: NEITHER)).reasons[2]
    assert "or more in every seed: none." in reason
    assert reason.endswith("is a number in every seed: none.")


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    header = TrialRecord(Path(), trials[0].header, [], None)
    for some in ([header], trials[:1], trials[-3:], [header, *trials[1:]]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


# ---- arms and nets


@pytest.fixture(scope="module")
def images():
    return Classification(data.load("fashion-mini"), 50)


def test_every_net_races_with_bn_and_without():
    for scale, depths in DEPTHS.items():
        arms = EXPERIMENT.arms(scale)
        assert len({arm.name for arm in arms}) == len(arms) == 4 * sum(map(len, depths.values()))
        assert all(arm.settings.items() >= SIZES[scale].items() for arm in arms)
        for one, other in zip(arms[::2], arms[1::2], strict=True):
            differing = {key for key in one.settings if one.settings[key] != other.settings[key]}
            assert differing == {"norm"}
        json.dumps([arm.settings for arm in arms])


def test_nets_that_are_compared_differ_in_one_thing():
    for deep, shallow in deep_and_shallow("desk"):
        assert deep.depth > shallow.depth
        assert deep == shallow._replace(depth=deep.depth)
    assert [(one._replace(weights="he"), one.weights) for one, _ in gaussian_and_he("desk")] == [
        (other, "gaussian") for _, other in gaussian_and_he("desk")
    ]


def layers(model):
    return [m.requires_grad_(False) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


@pytest.mark.parametrize("of", nets("quick"))
def test_weights_depend_on_the_seed_alone_and_gaussian_ones_have_one_width(of, images):
    torch.rand(3)
    bn, none, other = (net(ARMS[of.arm(norm)].settings, images, seed) for norm, seed in ((BN, 3), (NONE, 3), (NONE, 4)))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(layers(bn), layers(none), strict=True))
    assert not any(torch.equal(a.weight, b.weight) for a, b in zip(layers(none), layers(other), strict=True))
    assert all(layer.bias is None or not layer.bias.any() for layer in layers(none))
    assert sum(isinstance(m, nk.BatchNorm2d) for m in bn.modules()) == len(layers(bn)) - 1  # all but the classifier
    he = net(ARMS[of._replace(weights="he").arm(NONE)].settings, images, 3)
    widths = [
        float((a.weight / b.weight).mean()) * math.sqrt(2 / b.weight[0].numel())
        for a, b in zip(layers(none), layers(he), strict=True)
    ]
    sigma = SIGMA / math.sqrt(SIZES["quick"]["width"])
    expected = [sigma if of.weights == "gaussian" else math.sqrt(2 / b.weight[0].numel()) for b in layers(he)]
    assert widths == pytest.approx(expected, rel=1e-3)


def test_the_builds_are_what_they_say(images):
    for of in nets("quick"):
        model = net(ARMS[of.arm(NONE)].settings, images, 0)
        if of.family == "inception":
            assert len(model.blocks) == of.depth
        else:
            assert len(layers(model)) == of.depth
            assert bool(model.branches()) == (of.family == "residual")


@pytest.mark.parametrize("steps", [16, 192, 20_000])
def test_early_steps_are_told_apart(steps):
    found = measured_at(steps)
    assert (found[0], found[-1]) == (max(1, round(steps / 32)), steps)
    assert found == sorted(set(found))
    assert all(later - 0.5 <= 1.25 * (earlier + 0.5) for earlier, later in itertools.pairwise(found))


def test_all_nets_in_the_race_are_tested_and_bn_with_the_statistics_of_training_images():
    training = EXPERIMENT.training(Trial("depth", ARMS["plain-8-he-bn"], 0, "quick", "fashion-mini"))
    race = training.model
    for (x, y), _ in zip(training.batches(0), range(3), strict=False):
        training.update(x, y)
    race.eval()
    before = {name: value.clone() for name, value in race.named_parameters()}
    with torch.no_grad():
        found = training.measure(race)
    large, _ = next(Classification(data.load("fashion-mini")).batches(128, 0, 0))
    for one in race.running_nets().values():
        pooled = nk.recalibrate(one, [large]).model.state_dict()
        stored = {name: value for name, value in one.named_buffers() if "running" in name}
        assert len(stored) == 2 * 7
        assert all(torch.allclose(value, pooled[name], 1e-4, 1e-4) for name, value in stored.items())
    assert [*found["accuracies"]] == [*race.running_nets()]
    assert len(found["accuracies"]) == 3
    assert found["accuracy"] == max(found["accuracies"].values())
    assert all(torch.equal(value, before[name]) for name, value in race.named_parameters())


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "residual-8-he-bn"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    one = Trial("depth", ARMS[name], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert found.end["step"] == 16
    fields = {line["step"]: [*line["accuracies"]] for line in found.measured}
    assert [*fields] == measured_at(16)
    assert len(fields[1]) == 3
    assert {rate for field in fields.values() for rate in field} <= {
        name for rate in RATES for name in (f"{rate:g}", f"{rate:g} decayed")
    }
    assert EXPERIMENT.findings(Run(Path(), [found])).outcome == "unclear"
    assert_resumed_as_unbroken(EXPERIMENT, one, found, tmp_path / "resumed", steps=6)
