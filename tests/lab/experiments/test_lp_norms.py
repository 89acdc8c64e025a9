"""Norms are of what comes in, and the verdict follows from the records."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.lp_norms import EXPERIMENT, NORMS, POWERS, RATES, LpNorm2d, average_norm, is_as_good
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned

ARMS = {arm.settings["norm"]: arm for arm in EXPERIMENT.arms("quick")}
EVEN = (0.85, 0.85, 0.85)


def record(norm, rate, seed, end, status="done"):
    header = {"experiment": "lp-norms", "arm": f"{norm}-{rate:g}", "seed": seed, "scale": "desk"}
    header |= {"settings": {"norm": norm, "rate": rate}}
    accuracies = [(0, 0.1), (50, end - 0.2), (100, end - 0.1), (150, end), (200, end + 0.1)]
    measured = [{"step": step, "loss": 0.5, "accuracy": value} for step, value in accuracies]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def run_of(status="done", **ends):
    """Three seeds; everything is best at the second rate."""
    ends = dict.fromkeys(NORMS, EVEN) | {"plain": (0.7,) * 3} | ends
    trials = [
        record(norm, rate, seed, end - 0.05 * (rate != 0.1), status)
        for norm, of in ends.items()
        for rate in RATES["desk"]
        for seed, end in enumerate(of)
    ]
    return Run(Path(), trials)


def with_diverged(run, norm):
    return Run(
        Path(),
        [
            record(norm, t.header["settings"]["rate"], t.seed, 0.9, "diverged")
            if t.header["settings"]["norm"] == norm
            else t
            for t in run.trials
        ],
    )


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(l1=(0.835, 0.9, 0.84)), "supported"),  # behind by less than the margin
        (run_of(linf=(0.8, 0.85, 0.85)), "unclear"),
        (run_of(linf=(0.8, 0.82, 0.81)), "contradicted"),
        (run_of(l2=(0.8, 0.82, 0.81), l1=(0.9, 0.9, 0.9)), "contradicted"),
        (with_diverged(run_of(), "linf"), "contradicted"),
        (with_diverged(run_of(), "plain"), "supported"),
        (run_of(status=None), "unclear"),
        (Run(Path(), [t for t in run_of().trials if t.arm != "l1-0.1"]), "unclear"),
        (Run(Path(), [t for t in run_of().trials if not t.arm.startswith("bn")]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_margin():
    assert is_as_good([0.1, -0.019]) is True
    assert is_as_good([-0.1, -0.021]) is False
    assert is_as_good([-0.1, 0.1]) is None
    assert is_as_good([]) is None


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(l1=(0.86, 0.84, 0.87)))
    (table,) = findings.tables
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.columns[5] == "steps to 80.7%"  # 95% of BN's 85%
    assert rows["l1"][:2] == ["81.00 (79.00 to 82.00)", "86.00 (84.00 to 87.00)"]
    assert rows["l1"][2:4] == [rows["l1"][0], 0.1]
    assert (rows["bn"][4], rows["plain"][4]) == ("150 (150 to 150)", "never")
    assert findings.reasons[0].startswith("l1 - bn: 1.00 (-1.00 to 2.00) points, as well; l1 86.00")
    assert "plain - bn: -15.00" in findings.reasons[3]
    assert [curve.name for curve in findings.figures[0].curves] == ["plain", "bn", "l1", "l2", "linf"]
    assert findings.figures[0].curves[2].y == pytest.approx([0.1, 0.66, 0.76, 0.86, 0.96])


def test_a_run_under_way_has_findings():
    trials = run_of().trials
    for some in (trials[:1], trials[-1:], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


# ---- the norms


def maps(mean=0.0, channels=3, seed=0):
    """Maps whose channels have different sizes."""
    torch.manual_seed(seed)
    return torch.randn(6, channels, 4, 5, dtype=torch.float64) * torch.tensor([0.5, 1.0, 4.0]).view(-1, 1, 1) + mean


def randomized(p):
    torch.manual_seed(7)
    layer = LpNorm2d(3, p).double()
    for tensor, low in ((layer.weight, 0.5), (layer.bias, -0.5), (layer.running_mean, -0.5), (layer.running_norm, 0.5)):
        nn.init.uniform_(tensor, low, low + 1)
    return layer


@pytest.mark.parametrize("p", POWERS.values())
def test_an_average_norm(p):
    x = maps(2.0)
    values = x.movedim(1, 0).flatten(1)  # 120 of each channel
    expected = values.abs().amax(1) if p == float("inf") else torch.linalg.vector_norm(values, p, 1) / 120 ** (1 / p)
    torch.testing.assert_close(average_norm(x, p), expected)


@pytest.mark.parametrize("p", POWERS.values())
def test_the_mean_is_subtracted_and_the_norm_is_of_what_came_in(p):
    x, layer = maps(2.0), randomized(p)
    y = layer(x)
    scale = layer.weight / (average_norm(x, p) + layer.eps)
    expected = (x - x.mean((0, 2, 3), keepdim=True)) * scale.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(y.mean((0, 2, 3)), layer.bias)


def test_l2_is_batch_norm_where_means_are_zero_and_is_not_elsewhere():
    layer, bn = randomized(2.0), nk.BatchNorm2d(3, eps=1e-12).double()
    layer.eps = 0.0
    with torch.no_grad():
        bn.weight.copy_(layer.weight)
        bn.bias.copy_(layer.bias)
    x = maps()
    x -= x.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(layer(x), bn(x))
    assert (layer(x + 3) - bn(x + 3)).abs().max().item() > 0.1
    layer.eval().running_mean.zero_()
    layer.running_norm.copy_(bn.eval().running_var.copy_(torch.rand(3) + 0.5).sqrt())
    bn.running_mean.zero_()
    torch.testing.assert_close(layer(x), bn(x))  # and with the same statistics stored


@pytest.mark.parametrize("p", POWERS.values())
def test_statistics_are_stored_and_used_in_evaluation(p):
    x, layer = maps(2.0), randomized(p)
    mean, norm = layer.running_mean.clone(), layer.running_norm.clone()
    layer(x)
    torch.testing.assert_close(layer.running_mean, 0.9 * mean + 0.1 * x.mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_norm, 0.9 * norm + 0.1 * average_norm(x, p))
    stored = layer.eval().running_norm.clone()
    whole = layer(x)
    assert torch.equal(layer.running_norm, stored)
    torch.testing.assert_close(layer(x[:1]), whole[:1])  # batch-mates do not matter


@pytest.mark.parametrize("p", POWERS.values())
def test_gradients_flow_through_mean_and_norm(p):
    layer, x = randomized(p), maps(2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, layer.weight, layer.bias))
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    torch.testing.assert_close(gradient.sum((0, 2, 3)), _along_norm(layer, x, gradient), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("p", POWERS.values())
def test_a_channel_of_zeros_has_finite_gradients(p):
    layer, x = randomized(p), maps(2.0).index_fill_(1, torch.tensor([1]), 0.0).requires_grad_()
    layer(x).square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, layer.weight, layer.bias))


def _along_norm(layer, x, gradient):
    """What the gradient along a common shift of a channel is by finite differences: only the norm changes with it."""
    step, found = 1e-6, []
    for channel in range(3):
        shift = torch.zeros(3, 1, 1, dtype=torch.float64)
        shift[channel] = step
        with torch.no_grad():
            found.append(float((layer(x + shift).pow(3).sum() - layer(x - shift).pow(3).sum()) / (2 * step)))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("p", POWERS.values())
def test_a_channel_of_zeros_has_a_finite_gradient(p):
    x = maps()
    x[:, 1] = 0.0
    layer = LpNorm2d(3, p).double()
    layer(x.requires_grad_()).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()


def test_arms_are_what_their_settings_say():
    weights = []
    for name, arm in ARMS.items():
        training = EXPERIMENT.training(Trial("lp-norms", arm, 3, "quick", "fashion-mini"))
        found = [m for m in training.model.modules() if isinstance(m, LpNorm2d | nk.BatchNorm2d)]
        assert len(found) == (0 if name == "plain" else 8)
        assert {getattr(m, "p", "bn") for m in found} == ({POWERS.get(name, "bn")} if found else set())
        convolutions = [m for m in training.model.modules() if isinstance(m, nn.Conv2d)]
        assert {conv.bias is None for conv in convolutions} == {name != "plain"}
        weights.append([conv.weight for conv in convolutions])
    assert list(ARMS) == ["linf", "l2", "l1", "bn", "plain"]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


@pytest.mark.parametrize("norm", thinned(["l1", "linf"], ["l1"].__contains__))
def test_a_quick_trial(norm, tmp_path):
    trial = Trial("lp-norms", ARMS[norm], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path), lambda *step: None)
    run = read_run(tmp_path)
    (ended,) = run.trials
    assert ended.series("accuracy")[0] == [0, 6, 9, 12]
    losses = ended.series("loss")[1]
    assert losses[-1] < losses[0]
    assert EXPERIMENT.findings(run).outcome == "unclear"
