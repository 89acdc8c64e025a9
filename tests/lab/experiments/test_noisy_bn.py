"""Noise is as algorithm 1 has it, in training alone; drifts and accuracies are compared as records have them."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.data.transforms import standardized
from normkit.lab.experiment import Trial
from normkit.lab.experiments.noisy_bn import EXPERIMENT, POPULATION, Noise, drifts_more, keeps_up, net
from normkit.lab.measures import accuracy
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
IMAGES = Classification(data.load("fashion-mini"))
DRIFTS = {"plain": (0.1, 0.05), "bn": (0.01, 0.01), "noisy-bn": (0.4, 0.1), "noisy-plain": (0.9, 0.9)}
ENDS = {"plain": 0.8, "bn": 0.86, "noisy-bn": 0.85, "noisy-plain": 0.3}


def record(arm, seed, drifts, end, status="done", gain=0.0):
    """Evaluations in twos, the second of which has the drift of a step; between twos all drift alike.

    With population statistics, accuracies of nets with BN are so much higher.
    """
    header = {"experiment": "noisy-bn", "arm": arm, "seed": seed, "scale": "desk"}
    measured = [{"step": 0, "loss": None, "accuracy": 0.1}]
    for step in (1, 100, 101, 200, 201, 300):
        mean, deviation = (None, None) if step == 1 else drifts if step % 100 == 1 else (5.0, 6.0)
        reading = {"step": step - 1, "probe": "ActivationMoments", "mean_drift": mean, "std_drift": deviation}
        readings = [reading | {"layer": layer} for layer in ("a", "b")]
        measured.append({"step": step, "loss": 0.5, "accuracy": end, "probes": readings})
        measured[-1] |= {"population": end + gain} if arm.endswith("bn") else {}
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(noisy_drifts=(DRIFTS["noisy-bn"],) * 3, noisy_ends=(0.85,) * 3, status="done", gain=0.0):
    """Three seeds; `gain` is what population statistics are to noisy-bn."""
    trials = []
    for seed, (drifts, end) in enumerate(zip(noisy_drifts, noisy_ends, strict=True)):
        trials += [record(arm, seed, DRIFTS[arm], ENDS[arm], status) for arm in ("plain", "bn", "noisy-plain")]
        trials += [record("noisy-bn", seed, drifts, end, status, gain)]
    return Run(Path(), trials)


def with_diverged(run, arm):
    return Run(Path(), [record(t.arm, t.seed, DRIFTS[arm], 0.9, "diverged") if t.arm == arm else t for t in run.trials])


MORE, LESS, MIXED = (0.4, 0.1), (0.05, 0.01), (0.4, 0.01)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(noisy_ends=(0.9, 0.85, 0.8401)), "supported"),  # less than 2 points behind
        (run_of(noisy_ends=(0.85, 0.85, 0.83)), "unclear"),
        (run_of(noisy_ends=(0.83, 0.82, 0.7)), "contradicted"),
        (run_of(noisy_ends=(0.83, 0.82, 0.7), gain=0.2), "unclear"),  # the moving averages are to blame
        (run_of(noisy_ends=(0.83, 0.82, 0.7), gain=0.005), "contradicted"),
        (run_of(gain=-0.2), "supported"),
        (run_of(noisy_drifts=(MORE, MORE, LESS)), "unclear"),
        (run_of(noisy_drifts=(LESS, LESS, LESS)), "contradicted"),
        (run_of(noisy_drifts=(MIXED, MIXED, MIXED)), "unclear"),
        (with_diverged(run_of(), "noisy-plain"), "supported"),  # a control
        (with_diverged(run_of(), "plain"), "unclear"),
        (with_diverged(run_of(), "noisy-bn"), "contradicted"),
        (run_of(status=None), "unclear"),
        (Run(Path(), [trial for trial in run_of().trials if trial.arm != "noisy-plain"]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_both_moments_have_to_drift_more():
    assert drifts_more(1.1, 1.1) is True
    assert drifts_more(0.9, 1.0) is False
    assert drifts_more(1.1, 0.9) is None
    assert drifts_more(None, 1.1) is None


def test_population_statistics_can_leave_it_open_and_no_more():
    assert keeps_up(0.019, 0.5) is True
    assert keeps_up(0.02, 0.019) is None
    assert keeps_up(0.02, 0.02) is False


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of((MORE, (0.2, 0.1), (0.6, 0.1)), (0.85, 0.84, 0.87), gain=0.01))
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert list(rows) == ["plain", "bn", "noisy-bn", "noisy-plain"]
    assert rows["noisy-bn"][:2] == ["85.00 (84.00 to 87.00)", "86.00 (85.00 to 88.00)"]
    assert rows["plain"][:2] == ["80.00 (80.00 to 80.00)", "-"]
    assert rows["noisy-bn"][2:4] == ["0.500 (0.500 to 0.500)", "0.400 (0.200 to 0.600)"]
    assert rows["noisy-bn"][4:] == ["0.100 (0.100 to 0.100)", "5.000 (5.000 to 5.000)", "6.000 (6.000 to 6.000)"]
    assert "4.00 (2.00 to 6.00) for the mean, 2.00 (2.00 to 2.00) for the deviation" in findings.reasons[0]
    assert "both more in 3 of 3 seeds" in findings.reasons[0]
    assert "1.00 (-1.00 to 2.00) points behind bn with moving averages" in findings.reasons[1]
    assert "0.00 (-2.00 to 1.00) points behind bn with population statistics" in findings.reasons[1]
    assert "less than 2 in 2 and 3 of 3 seeds" in findings.reasons[1]
    assert {step % 100 for curve in findings.figures[0].curves for step in curve.x} == {0}
    curves = {curve.name: curve for curve in findings.figures[1].curves}
    assert (curves["noisy-bn"].x, curves["noisy-bn"].y) == ([101.0, 201.0], [0.4, 0.4])


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    for some in (trials[:1], trials[3:4], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


# ---- the noise


def noise_of(x, seed=0):
    torch.manual_seed(seed)
    return Noise(True)(x)


def test_shifts_are_drawn_for_units_and_then_for_values():
    shifts = noise_of(torch.zeros(40, 6, 10, 10)).movedim(1, 0).flatten(1)
    assert float(shifts.abs().max()) <= 0.6
    spread = shifts.amax(1) - shifts.amin(1)
    assert float(spread.max()) <= 0.2 + 1e-6
    assert float(spread.min()) > 0.19  # of 4,000 uniform values
    centres = shifts.mean(1)
    assert float(centres.abs().max()) <= 0.5 + 0.01
    assert float(centres.max() - centres.min()) > 0.1  # units differ


def test_scales_are_drawn_for_units_and_then_for_values():
    scales = (noise_of(torch.ones(40, 6, 10, 10)) - noise_of(torch.zeros(40, 6, 10, 10))).movedim(1, 0).flatten(1)
    centres = scales.mean(1)
    assert 1 - 0.01 < float(centres.min()) < float(centres.max()) < 1.25 + 0.01
    assert float(centres.max() - centres.min()) > 0.05
    torch.testing.assert_close(scales.std(1), torch.full((6,), 0.1), rtol=0.1, atol=0)


def test_noise_is_drawn_anew_from_the_global_random_state():
    x = torch.randn(4, 3, 5, 5)
    torch.manual_seed(1)
    noise = Noise(True)
    one, other = noise(x), noise(x)
    assert not torch.equal(one, other)
    assert torch.equal(noise_of(x, 1), one)


def test_there_is_no_noise_in_evaluation_nor_where_it_is_off():
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(Noise(True).eval()(x), x)
    assert torch.equal(Noise(False)(x), x)


# ---- the nets


def randomized(model, seed=5):
    """Weights and stored statistics that are not those of the start."""
    torch.manual_seed(seed)
    models.initialize_(model, "glorot", seed=seed)
    for module in model.modules():
        if isinstance(module, nk.BatchNorm2d):
            for tensor, low in ((module.weight, 0.5), (module.bias, -0.5), (module.running_mean, -0.5)):
                nn.init.uniform_(tensor, low, low + 1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


@pytest.mark.parametrize(("name", "norm"), [("plain", None), ("bn", nk.BatchNorm2d)])
@pytest.mark.parametrize("mode", [True, False])
def test_without_noise_nets_are_the_usual_ones(name, norm, mode):
    usual = randomized(models.vgg(norm, in_channels=1, width=4, init=None)).train(mode)
    ours = randomized(net(ARMS[name].settings, IMAGES)).train(mode)
    x = torch.randn(8, 1, 28, 28)
    torch.testing.assert_close(ours(x), usual(x), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in usual.parameters())


@pytest.mark.parametrize(("noisy", "usual"), [("noisy-bn", "bn"), ("noisy-plain", "plain")])
def test_noise_changes_training_and_not_evaluation(noisy, usual):
    ours, theirs = (randomized(net(ARMS[name].settings, IMAGES)) for name in (noisy, usual))
    x = torch.randn(8, 1, 28, 28)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert (ours.train()(x) - theirs.train()(x)).abs().max().item() > 1e-3


@pytest.mark.parametrize("name", ARMS)
def test_noise_is_between_each_norm_and_its_relu(name):
    model = net(ARMS[name].settings, IMAGES)
    units = [unit for unit in model.modules() if isinstance(unit, nn.Sequential) and hasattr(unit, "layer")]
    norm = [nk.BatchNorm2d] if name.endswith("bn") else []
    assert len(units) == 8
    assert all([type(m) for m in unit] == [nn.Conv2d, *norm, Noise, nn.ReLU] for unit in units)
    assert {unit.noise.is_on for unit in units} == {name.startswith("noisy")}


def test_all_arms_start_from_the_same_weights():
    weights = []
    for arm in ARMS.values():
        model = EXPERIMENT.training(Trial("noisy-bn", arm, 3, "quick", "fashion-mini")).model
        weights.append([m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


def test_accuracies_with_population_statistics_leave_the_stored_ones():
    training = EXPERIMENT.training(Trial("noisy-bn", ARMS["noisy-bn"], 3, "quick", "fashion-mini"))
    model = randomized(training.model).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        found = training.measure(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        batches = [x for x, _ in itertools.islice(training.batches(0), POPULATION)]
        other = nk.recalibrate(model, batches, method="paper").model  # noise is off: it evaluates
    _, labels = data.load("fashion-mini").test
    images = standardized(data.load("fashion-mini").train.pixels)(data.load("fashion-mini").test.pixels)
    assert found == {"accuracy": accuracy(model, images, labels), "population": accuracy(other, images, labels)}


# ---- trials


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for name in ("plain", "noisy-bn"):
        trial = Trial("noisy-bn", ARMS[name], 0, "quick", "fashion-mini")
        run_trial(EXPERIMENT, trial, RunOptions(directory), lambda *step: None)
    return read_run(directory)


def test_quick_trials_record_drifts(run):
    assert EXPERIMENT.findings(run).outcome == "unclear"
    for trial in run.trials:
        assert [line["step"] for line in trial.measured] == [0, 1, 6, 7, 12]
        layers = [[reading["layer"] for reading in line["probes"]] for line in trial.measured[1:]]
        assert layers[0] == layers[-1]
        assert len(layers[0]) == 8
        assert all(name.endswith(".noise") for name in layers[0])
    drifts = [reading["mean_drift"] for reading in run.of("noisy-bn")[0].measured[3]["probes"]]
    assert min(drifts) > 0.05  # units' shifts are drawn anew: 0.4 deviations on average


@pytest.mark.deep
def test_interrupted_and_resumed_it_has_the_unbroken_record(run, tmp_path):
    """Noise comes from the global random state, and drifts are from what the probe remembers."""
    trial = Trial("noisy-bn", ARMS["noisy-bn"], 0, "quick", "fashion-mini")
    assert_resumed_as_unbroken(EXPERIMENT, trial, run.of("noisy-bn")[0], tmp_path)
