"""The identities hold before norms and fail without them, and the verdict follows from the records."""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.lab.experiment import Trial
from normkit.lab.experiments.scale_invariance import DECAYS, EXPERIMENT, GROWTH, TOYS, growth, relaxations, rests
from normkit.lab.models.toy_problem import (
    ToyNet,
    direction_distance,
    exact_norm,
    scaling_errors,
    shrinkage,
    with_growing_rate,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("desk")}
QUICK = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
EXACT = {"output": 1e-15, "input_gradient": 2e-15, "weight_gradient": 3e-15, "direction": 1e-13, "turned": 0.8}


def record(arm, seed, measured, is_ended=True):
    header = {"arm": arm, "seed": seed, "scale": "desk", "settings": ARMS[arm].settings}
    return TrialRecord(Path(), header, measured, {"status": "done"} if is_ended else None)


def seen(step, layer, **numbers):
    return {"step": step, "probe": "EffectiveRate", "layer": layer, "rate": 0.1, "gradient": 2.0} | numbers


def growing(factor):
    """Squared norms that grow by (rate * gradient)^2 = 0.04 a step, times a factor; those of the output shrink."""
    norms = [math.sqrt(9 + 0.04 * factor * step) for step in range(4)]
    lines = [[seen(s, "1.layer", norm=n), seen(s, "2", norm=1 / n)] for s, n in enumerate(norms)]
    return [{"step": step + 1, "probes": probes} for step, probes in enumerate(lines)]


def resting(norm, angle):
    """Norms and angles that are these times the prediction in the second half, and three times that in the first."""
    return [
        {
            "step": step,
            "probes": [
                seen(step, layer, norm=4 * norm * far, angle=0.06 * angle * far)
                | {"equilibrium_norm": 4.0, "equilibrium_angle": 0.06}
                for layer in ("1.layer", "2.layer")
            ],
        }
        for step, far in ((20, 3), (40, 3), (60, 1), (80, 1))
    ]


def run_of(exact=EXACT, factor=1.0, norm=1.02, angle=0.97, seeds=2, **options):
    trials = []
    for seed in range(seeds):
        trials += [record(arm, seed, [{"step": 400, **exact}], **options) for arm in TOYS]
        trials.append(record(GROWTH, seed, growing(factor), **options))
        trials += [record(arm, seed, resting(norm, angle), **options) for arm in DECAYS]
    return Run(Path(), trials)


def one_seed(run, **others):
    """The first seed of one run, the second of another."""
    return Run(Path(), [t for t in run.trials if t.seed == 0] + [t for t in run_of(**others).trials if t.seed == 1])


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(exact=EXACT | {"weight_gradient": 1e-9}), "contradicted"),
        (run_of(exact=EXACT | {"direction": 1e-8}), "contradicted"),
        (run_of(factor=1.001), "contradicted"),
        (run_of(factor=-1.0), "contradicted"),  # norms that shrink
        (run_of(norm=1.2), "contradicted"),
        (run_of(angle=0.8), "contradicted"),
        (one_seed(run_of(), norm=1.2), "unclear"),
        (one_seed(run_of(), exact=EXACT | {"output": 1e-9}), "unclear"),
        (run_of(is_ended=False), "unclear"),
        (Run(Path(), run_of().trials[:-1]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_norms_that_had_no_time_to_rest_leave_it_open():
    run = run_of(norm=2.0)
    assert EXPERIMENT.findings(run).outcome == "contradicted"
    for trial in run.trials:
        trial.header["settings"] = {**trial.header["settings"], "steps": 2000}
    assert {relaxations(trial) for trial in run.of("decay")} == {4.0}
    assert EXPERIMENT.findings(run).outcome == "unclear"


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    for some in (trials[:1], trials[2:3], trials[3:4], trials[:-1], [record(GROWTH, 0, [], is_ended=False)]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(factor=1.0000002))
    errors, resting_at = (table.rows for table in findings.tables)
    assert errors[0] == ["toy", "1e-15", "2e-15", "3e-15", "1e-13"]
    assert resting_at[1][:4] == ["decay", "2.layer", "4.080 (4.080 to 4.080)", "1.020 (1.020 to 1.020)"]
    assert resting_at[1][4:] == ["0.0582 (0.0582 to 0.0582)", "0.970 (0.970 to 0.970)"]
    assert "grow in 6 of 6 steps of layers, by rate^2 |g|^2 up to 2e-07 of it" in findings.reasons[1]
    assert "1.020 (1.020 to 1.020) times the prediction" in findings.reasons[2]
    assert "1e-13 apart" in findings.reasons[3]
    norms = findings.figures[1]
    assert [list(curve.y) for curve in norms.curves] == [pytest.approx([12.24, 12.24, 4.08, 4.08]), [4.0] * 4]


@pytest.mark.parametrize("arm", sorted(ARMS))
@pytest.mark.parametrize("scale", ["desk", "full"])
def test_trainings_are_long_enough_to_be_judged(arm, scale):
    settings = {arm.name: arm.settings for arm in EXPERIMENT.arms(scale)}[arm]
    if arm in DECAYS:
        assert relaxations(TrialRecord(Path(), {"settings": settings}, [], None)) >= 8
    if arm in TOYS:  # the root is real
        assert settings["rate"] * settings["decay"] < (1 - math.sqrt(settings["momentum"])) ** 2


# ---- the toy problem


def randomized(norm, seed):
    model = ToyNet(norm, 1.0, seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * torch.rand(len(weight), 1, dtype=weight.dtype).add_(0.1))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_the_identities_hold_before_norms_and_not_without(seed):
    model = randomized(exact_norm, seed)
    assert max(scaling_errors(model, model.batch()).values()) < 1e-11
    plain = randomized(None, seed)
    assert min(scaling_errors(plain, plain.batch()).values()) > 0.1


def descended(model, batch, settings, steps):
    """Decay at a constant rate, as torch does it."""
    model = deepcopy(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings["rate"], momentum=settings["momentum"], weight_decay=settings["decay"]
    )
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return model.weights()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arm", TOYS)
def test_a_growing_rate_stands_for_decay_before_norms_and_not_without(arm, seed):
    settings = {**ARMS[arm].settings, "steps": 60}

    def apart(norm):
        model = ToyNet(norm, 2.0, seed)
        batch = model.batch()
        twin = with_growing_rate(model, model.weights(), batch, settings, 60)
        return max(map(direction_distance, descended(model, batch, settings, 60), twin))

    assert apart(exact_norm) < 1e-11
    assert apart(None) > 1e-4


def test_what_decay_alone_does():
    assert shrinkage(0.01, 0.0) == pytest.approx(0.99, abs=1e-15)
    root = shrinkage(1e-4, 0.9)
    weight, velocity = 1.0, 1 / 0.1 * (1 - root) / root  # of weights that have always shrunk by the root
    for _ in range(50):
        velocity = 0.9 * velocity + 1e-3 * weight
        weight -= 0.1 * velocity
    assert weight == pytest.approx(root**50, rel=1e-12)


# ---- trials


def run_quick(name, out):
    run_trial(
        EXPERIMENT, Trial("scale-invariance", QUICK[name], 1, "quick", "fashion-mini"), RunOptions(out), lambda *_: None
    )
    (trial,) = read_run(out).of(name)
    return trial


def test_decay_is_of_weights_before_norms_alone():
    training = EXPERIMENT.training(Trial("scale-invariance", QUICK["decay"], 0, "quick", "fashion-mini"))
    decayed, others = training.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.02, 0)
    assert [p.dim() for p in decayed["params"]] == [2, 2]
    assert {id(p) for g in (decayed, others) for p in g["params"]} == {id(p) for p in training.model.parameters()}


@pytest.mark.parametrize("name", TOYS)
def test_a_quick_toy(name, tmp_path):
    trial = run_quick(name, tmp_path)
    (line,) = trial.measured
    assert max(line[key] for key in ("output", "input_gradient", "weight_gradient", "direction")) < 1e-10
    assert line["turned"] > 0.01


def test_a_quick_trial_without_decay_grows_step_by_step(tmp_path):
    trial = run_quick(GROWTH, tmp_path)
    assert len(growth(trial)) == 2 * 11  # two layers before norms, and the output is not one of them
    assert growth(trial) == pytest.approx([1.0] * 22, abs=1e-6)


def test_a_quick_trial_with_decay(tmp_path):
    trial = run_quick("decay-momentum", tmp_path)
    assert set(rests(trial)) == {"1.layer", "2.layer"}
    assert all(math.isfinite(value) for rest in rests(trial).values() for value in rest)
    assert EXPERIMENT.findings(read_run(tmp_path)).outcome == "unclear"
