"""What the arms are made of, and the verdict from the records."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.affine import EXPERIMENT, ConstantStatistics
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
STEPS = [0, 100, 200, 300, 400]
AFFINES = {"standardize": 0.6, "shift": 0.55, "scale": 0.56, "both": 0.5}
SUPPORTING = {
    "losses": AFFINES | {"biased": 0.5001, "detached": 2.0, "detached-biases-alone": 2.3},
    "ways": {"biased": [0, 1e-8, 1e-8, 1e-8, 1e-8], "detached-biases-alone": [0, 1, 2, 3, 4]},
    "gradient": 1e-7,
}


def record(arm, seed, loss, ways=None, gradient=None, status="done"):
    header = {"arm": arm, "scale": "desk", "seed": seed, "steps": STEPS[-1]}
    measured = [{"step": step, "accuracy": 0.7, "loss": loss if step else None} for step in STEPS]
    for line, way in zip(measured, ways or [], strict=False):
        line["moved"] = way
        line["gradient"] = gradient if line["step"] else None
    return TrialRecord(Path(), header, measured, {"status": status, "step": STEPS[-1]} if status else None)


def run_of(status="done", **changes):
    """A run that supports the claim, but for changes."""
    losses, ways, gradient = (SUPPORTING | changes).values()
    return Run(
        Path(),
        [
            record(arm, seed, loss + seed / 100, ways.get(arm), gradient if arm == "biased" else None, status)
            for seed in range(2)
            for arm, loss in losses.items()
        ],
    )


def changed(what, **values):
    return {what: SUPPORTING[what] | {name.replace("_", "-"): value for name, value in values.items()}}


LEVELLING = changed("ways", detached_biases_alone=[0, 3, 4, 4.5, 4.6])


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(**changed("losses", standardize=0.49)), "unclear"),
        (run_of(gradient=0.1), "unclear"),
        (run_of(**changed("losses", biased=0.52)), "unclear"),
        (run_of(**LEVELLING), "unclear"),
        (run_of(**changed("ways", biased=[0, 0.1, 0.1, 0.1, 0.1])), "unclear"),
        (run_of(gradient=0.1, **changed("losses", standardize=0.49), **LEVELLING), "contradicted"),
        (run_of(status=None), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_a_loss_that_does_not_stay_is_not_the_papers_example():
    run = run_of()
    run.of("detached-biases-alone")[1].measured[-1]["loss"] = 2.0
    findings = EXPERIMENT.findings(run)
    assert findings.outcome == "unclear"
    assert "loss changes by at most 0.3;" in findings.reasons[2]


def test_a_loss_that_stopped_being_finite_is_the_worst():
    run = run_of(**changed("losses", standardize=0.4))
    for trial in run.of("standardize"):
        trial.end["step"] = 399
    assert EXPERIMENT.findings(run).outcome == "supported"


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of())
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert rows["shift"] == ["0.5550 (0.5500 to 0.5600)", "0.7000 (0.7000 to 0.7000)", "-", "-"]
    assert rows["biased"][2:] == ["1e-08 (1e-08 to 1e-08)", "1e-07 (1e-07 to 1e-07)"]
    assert "2 of 2 seeds" in findings.reasons[0]
    assert "1e-07 of the weights' largest" in findings.reasons[1]
    assert "0.0001 apart" in findings.reasons[1]
    assert "4.00 (4.00 to 4.00), of which 2.00 (2.00 to 2.00) in the second half" in findings.reasons[2]
    ways = findings.figures[2].curves
    assert [list(curve.y) for curve in ways] == [SUPPORTING["ways"]["biased"], [], [0, 1, 2, 3, 4]]


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    for some in (trials[:1], trials[4:5], trials[:6], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def training_of(name, seed=3):
    torch.manual_seed(seed)
    return EXPERIMENT.training(Trial("affine", ARMS[name], seed, "quick", "fashion-mini"))


def linears(model):
    return [module for module in model.hidden.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("name", "gamma", "beta"),
    [("standardize", 0, 0), ("shift", 0, 1), ("scale", 1, 0), ("both", 1, 1), ("biased", 1, 1), ("detached", 1, 1)],
)
def test_arms_are_what_their_settings_say(name, gamma, beta):
    model, usual = training_of(name).model, training_of("both").model
    norms = [module for module in model.modules() if isinstance(module, nk.BatchNorm1d)]
    assert [(n.weight is not None, n.bias is not None) for n in norms] == [(gamma, beta)] * 3
    assert {type(norm) for norm in norms} == {ConstantStatistics if name == "detached" else nk.BatchNorm1d}
    assert all((layer.bias is not None) == (name in ("biased", "detached")) for layer in linears(model))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(linears(model), linears(usual), strict=True))


def test_biases_alone_are_trained_where_that_is_asked_for():
    training = training_of("detached-biases-alone")
    trained = training.optimizer.param_groups[0]["params"]
    assert {id(p) for p in trained} == {id(layer.bias) for layer in linears(training.model)}
    assert {id(p) for p in training.model.parameters() if p.requires_grad} == {id(p) for p in trained}


def test_biases_before_norms_change_nothing_and_get_no_gradient():
    plain, biased, detached = (training_of(name) for name in ("both", "biased", "detached"))
    x, y = next(plain.batches(0))
    logits = [training.model(x) for training in (plain, biased, detached)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-5, atol=1e-5)
    for training, values in zip((biased, detached), logits[1:], strict=True):
        training.loss(values, y).backward()
        largest = [(layer.bias.grad.abs().max(), layer.weight.grad.abs().max()) for layer in linears(training.model)]
        assert all((bias < 1e-4 * weight) == (training is biased) for bias, weight in largest)


def test_constant_statistics_are_those_of_the_batch_and_are_stored():
    torch.manual_seed(0)
    ours, usual = ConstantStatistics(4).double(), nk.BatchNorm1d(4).double()
    x = torch.randn(6, 4, dtype=torch.float64).mul_(3).add_(2).requires_grad_()
    y = ours(x)
    torch.testing.assert_close(y, usual(x))
    torch.testing.assert_close(ours.running_mean, usual.running_mean)
    torch.testing.assert_close(ours.running_var, usual.running_var)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = (x.var(0, unbiased=False) + ours.eps).rsqrt().expand(6, 4)
    torch.testing.assert_close(gradient, expected)  # and not 0


def test_quick_trials_run(tmp_path):
    for name in ("biased", "detached-biases-alone"):
        run_trial(
            EXPERIMENT, Trial("affine", ARMS[name], 0, "quick", "fashion-mini"), RunOptions(tmp_path), lambda *_: None
        )
    biased, alone = (read_run(tmp_path).of(name)[0] for name in ("biased", "detached-biases-alone"))
    assert max(biased.series("gradient")[1]) < 1e-4
    assert biased.series("moved")[1][-1] < 1e-5
    _, ways = alone.series("moved")
    assert ways == sorted(ways)
    assert ways[-1] > 0.1
    losses = alone.series("loss")[1]
    assert max(losses) - min(losses) < 0.01
