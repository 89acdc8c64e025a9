"""The verdict follows from the records; arms differ in their norms, first weights, batches and rates alone."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab import data
from normkit.lab.data.transforms import from_signed_range
from normkit.lab.data.types import Images
from normkit.lab.experiment import Trial
from normkit.lab.experiments.gan import (
    EXPERIMENT,
    JUDGES,
    KINDS,
    RATES,
    SIZES,
    arm_name,
    at_best_rate,
    collapses,
    has_collapsed,
    is_closer,
    measured,
    nets,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.sample_quality import judge_of
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
KNOWN = {"training images": {"distance": 0.3}, "noise": {"distance": 90.0}}
KEYS = ("spread", "classes", "seen", "coverage", "density")


def trial(kind, rate, seed, distance=10.0, spread=3.0, status="done"):
    """A trial that comes to its distance and spread in the last three measurements."""
    arm = arm_name(kind, rate)
    header = {"experiment": "gan", "arm": arm, "seed": seed, "scale": "desk", "settings": {"rate": rate}}
    start = dict.fromkeys(KEYS, 0.5) | {"distance": 99.0, "batch_distance": 99.0, "samples": "start", "loss": 1.0}
    start["judge"] = 0.858
    start["references"] = {name: dict.fromkeys(KEYS, 0.5) | of for name, of in KNOWN.items()}
    end = start | {"distance": distance, "batch_distance": distance / 2, "spread": spread, "samples": f"{arm} {seed}"}
    lines = [line | {"step": 100 * i, "seconds": float(i)} for i, line in enumerate([start, start, end, end, end])]
    return TrialRecord(Path(), header, lines, {"status": status, "step": 400, "seconds": 4.0} if status else None)


def run_of(both=None, none=None, he=None, status="done", seeds=3):
    """Three seeds of all arms.

    At the lower rate those with BN are closest; at the higher one those without, which collapse at the lower.
    """
    trials = []
    for seed in range(seeds):
        for kind in KINDS:
            for i, rate in enumerate(RATES):
                of = {"distance": 20.0 + i}
                if kind == "both":
                    of |= ({"distance": 10.0} if i == 0 else {}) | _of_seed(both, seed)
                if kind == "none":
                    of |= {"distance": 15.0, "spread": 3.0} if i == 1 else {"distance": 60.0, "spread": 0.2}
                    of |= _of_seed(none, seed)
                if kind == "none-he":
                    of |= _of_seed(he, seed)
                trials.append(trial(kind, rate, seed, status=status, **of))
    return Run(Path(), trials)


def _of_seed(own, seed):
    own = own or {}
    return own.get(seed, {}) if any(isinstance(key, int) for key in own) else own


def without(run, arm, seed=0):
    return Run(Path(), [t for t in run.trials if (t.arm, t.seed) != (arm, seed)])


def with_status(run, kind, status):
    return Run(
        Path(),
        [
            TrialRecord(t.path, t.header, t.measured, t.end | {"status": status}) if t.arm.startswith(kind) else t
            for t in run.trials
        ],
    )


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(both={"distance": 11.9}), "supported"),
        (run_of(both={"distance": 12.1}), "unclear"),  # closer, and not clearly
        (run_of(both={"distance": 15.0}), "contradicted"),  # not closer
        (run_of(he={"distance": 9.0}), "contradicted"),  # from other weights nets without BN are closer still
        (run_of(both={2: {"distance": 30.0}}), "unclear"),
        (run_of(none={"spread": 1.1}), "contradicted"),  # none collapses
        (run_of(none={0: {"spread": 1.1}}), "unclear"),
        (run_of(both={"spread": 0.9}), "contradicted"),  # with BN all collapse
        (run_of(he={"spread": 0.1}), "supported"),
        (with_status(run_of(), "none", "diverged"), "supported"),
        (with_status(run_of(), "both", "diverged"), "contradicted"),
        (with_status(run_of(), "discriminator", "diverged"), "supported"),
        (run_of(status="diverged"), "contradicted"),
        (run_of(status=None), "unclear"),
        (without(run_of(), "both-mixed-0.001"), "unclear"),
        (without(run_of(), "both-0.0002"), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_parts_of_the_verdict():
    assert [is_closer(mine, 10.0) for mine in (7.9, 8.1, 10.0, 12.0)] == [True, None, False, False]
    inf = float("inf")
    assert [is_closer(5.0, inf), is_closer(inf, 5.0), is_closer(inf, inf)] == [True, False, False]
    assert [has_collapsed(trial("none", 0.001, 0, spread=of)) for of in (0.0, 0.99, 1.0)] == [True, True, False]
    assert has_collapsed(trial("none", 0.001, 0, status="diverged"))


def test_collapses_are_counted_seed_by_seed():
    trials = [trial("none", rate, 0, spread=0.1) for rate in RATES] + [trial("none", RATES[0], 1)]
    assert collapses(Run(Path(), [*trials, trial("both", RATES[0], 2, spread=0.1)]), "none") == {0: 2, 1: 0}


def test_nets_are_judged_at_the_rate_that_suits_them():
    trials = [trial("none", 0.0002, seed, of) for seed, of in enumerate((5.0, 9.0, 9.0))]
    trials += [trial("none", 0.001, seed, of) for seed, of in enumerate((8.0, 8.0, 8.0))]
    trials += [trial("none-he", 0.001, 0, 7.0)]
    run = Run(Path(), trials)
    assert {t.arm for t in at_best_rate(run, "none").values()} == {"none-0.001"}
    assert {seed: t.arm for seed, t in at_best_rate(run, "none", "none-he").items()} == {0: "none-he-0.001"}
    assert at_best_rate(run, "both") == {}


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(both={0: {"distance": 9.0}, 1: {"spread": 0.5}}))
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert list(rows) == [*KINDS, "training images", "noise"]
    assert rows["both"][:3] == ["both-0.0002", "10.00 (9.00 to 10.00)", "5.00 (4.50 to 5.00)"]
    assert (rows["both"][3], rows["both"][-1]) == ("3.00 (0.50 to 3.00)", "2 of 6")
    assert (rows["none"][0], rows["none"][1], rows["none"][-1]) == ("none-0.001", "15.00 (15.00 to 15.00)", "3 of 6")
    assert rows["noise"][1] == "90.00"
    assert "right on 85.8% of the test images" in findings.tables[0].note
    assert findings.tables[1].rows[1][1:] == [f"{of}.00 ({of}.00 to {of}.00)" for of in (60, 15)]
    assert "10.00 (9.00 to 10.00) with BN in both nets (both-0.0002) and" in findings.reasons[0]
    assert "15.00 (15.00 to 15.00) without (none-0.001): less than 0.8 of it in 3 of 3 seeds" in findings.reasons[0]
    assert "training images 0.30, noise 90.00" in findings.reasons[0]
    assert "2 of 6 with BN in both nets, 3 of 6 without; at fewer rates in 2 of 3 seeds" in findings.reasons[1]
    assert "10.00 (9.00 to 10.00) with stored statistics, 5.00 (4.50 to 5.00) with those" in findings.reasons[2]
    curves = {curve.name: curve for curve in findings.figures[0].curves}
    assert (curves["both"].x, curves["both"].y) == ([0.0, 100.0, 200.0, 300.0, 400.0], [99.0, 99.0, 10.0, 10.0, 10.0])
    assert (curves["noise"].x, curves["noise"].y) == ([0.0, 400.0], [90.0, 90.0])
    assert dict(findings.pictures[0].rows)["none-0.001"] == "none-0.001 0"


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    header = TrialRecord(Path(), trials[0].header, [], None)
    for some in ([header], trials[:1], trials[-2:], [header, *trials[1:]]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


# ---- arms and nets


@pytest.fixture(scope="module")
def images():
    return data.load("fashion-mini").train


def test_each_kind_is_trained_at_every_rate():
    for scale, sizes in SIZES.items():
        arms = EXPERIMENT.arms(scale)
        assert [(arm.settings["kind"], arm.settings["rate"]) for arm in arms] == [(k, r) for k in KINDS for r in RATES]
        own = {"kind", "rate", "generator", "discriminator", "init", "mixed"}
        assert all({k: v for k, v in arm.settings.items() if k not in own} == sizes for arm in arms)
        json.dumps([arm.settings for arm in arms])


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_where_the_arm_says(kind, images):
    gan = nets(ARMS[f"{kind}-0.0002"].settings, images, 3)
    norms = [sum(isinstance(m, nk.BatchNorm2d) for m in net.modules()) for net in (gan.generator, gan.discriminator)]
    assert norms == [2 * KINDS[kind].generator, 1 * KINDS[kind].discriminator]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_seed_alone(kind, images):
    def weights(name, seed):
        gan = nets(ARMS[name].settings, images, seed)
        return [m.weight.detach() for m in gan.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]

    torch.rand(3)
    mine, theirs = weights(f"{kind}-0.001", 3), weights("both-0.0002", 3)
    factors = [of / other for of, other in zip(mine, theirs, strict=True)]
    assert all(float((factor - factor.mean()).abs().max()) < 1e-3 * float(factor.mean()) for factor in factors)
    if kind != "none-he":
        assert all(torch.equal(of, other) for of, other in zip(mine, theirs, strict=True))
    assert not any(torch.equal(of, other) for of, other in zip(mine, weights(f"{kind}-0.001", 4), strict=True))


def test_images_must_be_square():
    oblong = Images(torch.zeros(4, 1, 28, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="square images; those of this set are 28x32"):
        nets(ARMS["both-0.0002"].settings, oblong, 0)


# ---- what is measured


def test_samples_with_batch_statistics_leave_the_stored_ones(images):
    judge = judge_of("fashion-mini", *JUDGES["quick"])
    gan = nets(ARMS["both-0.0002"].settings, images, 3)
    for _ in range(2):
        gan.generator(gan.draw(16))  # moves the statistics, and leaves them off those of a batch
    gan.eval()
    before = {name: tensor.clone() for name, tensor in gan.state_dict().items()}
    latent = gan.draw(64)
    with torch.no_grad():
        found = measured(gan, judge, latent, 16)
        assert not gan.generator.training
        assert all(torch.equal(tensor, before[name]) for name, tensor in gan.state_dict().items())
        stored = gan.generator(latent)
        gan.train()
        of_batches = torch.cat([gan.generator(some) for some in latent.split(16)])
    for key, drawn in {"distance": stored, "batch_distance": of_batches}.items():
        assert found[key] == pytest.approx(judge.of(from_signed_range(drawn))["distance"], rel=1e-3)  # bytes may round
    assert found["batch_distance"] != found["distance"]


def test_nets_without_stored_statistics_are_measured_once(images):
    judge = judge_of("fashion-mini", *JUDGES["quick"])
    gan = nets(ARMS["discriminator-0.0002"].settings, images, 3).eval()
    with torch.no_grad():
        assert "batch_distance" not in measured(gan, judge, gan.draw(32), 16)


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "both-mixed-0.001"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    one = Trial("gan", ARMS[name], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert (found.end["step"], found.end["status"]) == (8, "done")
    assert [line["step"] for line in found.measured] == [0, 4, 8]
    assert EXPERIMENT.findings(Run(Path(), [found])).outcome == "unclear"
    assert_resumed_as_unbroken(EXPERIMENT, one, found, tmp_path / "resumed", steps=6)
