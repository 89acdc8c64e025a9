"""The verdict follows from the records; statistics kept beside one another are what single layers would have kept."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.inference import (
    EXPERIMENT,
    MOMENTA,
    SIZES,
    SORTED,
    averages_of,
    keep_averages_,
    measure,
    net,
    norms_of,
    populations_of,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

EARLY = {0.01: 0.3, 0.001: 0.2}
END = {0.99: 0.7, 0.001: 0.75}


def line(step, averages, stored=0.0, batch=1.5, **others):
    """A measurement: 80% with everything that is not said to be otherwise."""
    found = {f"momentum {m}": averages.get(m, 0.8) for m in MOMENTA}
    found |= dict.fromkeys(["paper", "pooled", "accuracy", "batch 1"], 0.8)
    found |= {f"batch {size}": 0.8 for size in SIZES} | {f"sorted {size}": 0.3 for size in SORTED}
    return {
        "step": step,
        "seconds": 1.0,
        "logits": 2.0,
        "moved stored": stored,
        "moved batch": batch,
        "refused": None,
    } | (found | others)


def run_of(early=EARLY, end=END, status="done", arms=("conv", "mlp"), **others):
    trials = [
        TrialRecord(
            Path(),
            {"experiment": "inference", "arm": arm, "seed": seed},
            [line(30, early, **others), line(1500, end, **others)],
            {"status": status} if status else None,
        )
        for arm in arms
        for seed in range(3)
    ]
    return Run(Path(), trials)


def disagreeing(key, value):
    """A run in which one seed of one net ends elsewhere."""
    run = run_of()
    run.trials[1].measured[-1][key] = value
    return run


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(stored=1e-3), "contradicted"),  # batch-mates matter after all
        (run_of(batch=0.0), "contradicted"),  # or never did
        (run_of(**{"batch 256": 0.85}), "contradicted"),  # stored statistics are worse than the batch's
        (run_of(end={0.99: 0.7, 0.1: 0.7}), "contradicted"),  # moving averages do not get there
        (disagreeing("momentum 0.1", 0.7), "unclear"),
        (disagreeing("momentum 0.99", 0.8), "unclear"),
        (disagreeing("paper", 0.805), "supported"),  # within the margin
        (run_of(end={}), "unclear"),  # a wrong momentum does no harm
        (run_of(early={0.001: 0.2}), "unclear"),  # being early does none
        (run_of(status=None), "unclear"),
        (run_of(status="diverged"), "unclear"),
        (run_of(arms=("conv",)), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_the_numbers_are_those_of_the_records():
    run = run_of(**{"batch 1": None, "batch 2": 0.456})
    run.trials[0].measured[-1]["paper"] = 0.81
    findings = EXPERIMENT.findings(run)
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert rows["population, Algorithm 2"] == ["80.0 (80.0 to 80.0)", "80.0 (80.0 to 81.0)"]
    assert rows["moving average, momentum 0.01"] == ["30.0 (30.0 to 30.0)", "80.0 (80.0 to 80.0)"]
    assert rows["no eval(): batches of 2"][1] == "45.6 (45.6 to 45.6)"
    assert rows["no eval(): one image"][1] == "-"
    assert "by up to 0 of their standard deviation with stored statistics, by up to 0.75" in findings.reasons[0]
    assert findings.tables[2].rows[0] == ["conv", *(f"{v:.5f} ({v:.5f} to {v:.5f})" for v in (0.0, 1.5, 2.0))]
    assert "Algorithm 2 is 0.00 (-1.00 to 0.00) points behind batches of 256" in findings.reasons[1]
    assert "momentum 0.99 10.00 (10.00 to 11.00) points" in findings.reasons[1]
    assert "after 30 steps, behind it are momentum 0.01 50.00" in findings.reasons[2]
    assert list(findings.figures[0].curves[0].x) == [30, 1500]


def inputs():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(12, 6, generator=generator) * 3 + 1 for _ in range(5)]


def test_averages_are_those_of_layers_with_that_momentum():
    model = nn.Sequential(nk.BatchNorm1d(6))
    keep_averages_(model, (0.9, 0.1))
    layers = [nk.BatchNorm1d(6, momentum=momentum) for momentum in (0.9, 0.1)]
    for x in inputs():
        model(x)
        for layer in layers:
            layer(x)
    model.eval()(torch.zeros(2, 6))  # is evaluated, and does not count
    assert {"0.means", "0.variances"} <= set(model.state_dict())  # a trial that is resumed has them
    kept = averages_of(model)
    assert list(kept) == ["momentum 0.9", "momentum 0.1"]
    for (found,), layer in zip(kept.values(), layers, strict=True):
        torch.testing.assert_close(found.mean, layer.running_mean)
        torch.testing.assert_close(found.var, layer.running_var)


def test_population_statistics_are_algorithm_2s():
    batches = inputs()
    found = populations_of(nn.Sequential(nk.BatchNorm1d(6)), batches)
    expected = {"paper": torch.stack([x.var(0) for x in batches]).mean(0), "pooled": torch.cat(batches).var(0)}
    for method, (statistics,) in found.items():
        torch.testing.assert_close(statistics.mean.float(), torch.cat(batches).mean(0))
        torch.testing.assert_close(statistics.var.float(), expected[method])
    assert not torch.allclose(expected["paper"], expected["pooled"], rtol=1e-3)


def settled(kind, shape=(1, 28, 28)):
    """A net with averages after some batches, images in three shades, and their labels."""
    torch.manual_seed(0)
    model = net(kind, shape, 3)
    keep_averages_(model, MOMENTA)
    labels = torch.arange(60) % 3
    images = torch.randn(60, *shape) + labels.view(-1, 1, 1, 1)
    for x in images.split(20):
        model(x)
    return model.eval(), images, labels


@pytest.mark.parametrize("kind", ["vgg", "sigmoid-mlp"])
def test_measuring_leaves_the_net_as_it_was(kind):
    model, images, labels = settled(kind)
    before = deepcopy(model.state_dict())
    with torch.no_grad():
        found = measure(model, images, labels, images.split(20))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in norms_of(model))
    assert not any(module.training for module in model.modules())
    assert found["moved stored"] < 1e-5 < found["moved batch"]


@pytest.mark.parametrize(("kind", "is_refused"), [("vgg", False), ("sigmoid-mlp", True)])
def test_one_image_is_refused_where_it_has_no_variance(kind, is_refused):
    with torch.no_grad():
        model, images, labels = settled(kind, (3, 32, 32))
        found = measure(model, images, labels, images.split(20))
    assert (found["batch 1"] is None, "more than 1 value" in (found["refused"] or "")) == (is_refused, is_refused)


def test_a_quick_trial_trains_as_if_nothing_were_measured(tmp_path, monkeypatch):
    arm = EXPERIMENT.arms("quick")[1]
    trial = Trial("inference", arm, 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "measured"), lambda *step: None)
    monkeypatch.setattr("normkit.lab.experiments.inference.measure", lambda *_: {"accuracy": 0.5})
    run_trial(EXPERIMENT, trial, RunOptions(tmp_path / "not"), lambda *step: None)
    run, other = read_run(tmp_path / "measured"), read_run(tmp_path / "not")
    losses = [[line["loss"] for line in found.trials[0].measured] for found in (run, other)]
    assert losses[0] == losses[1]
    (ended,) = run.trials
    assert [line["step"] for line in ended.measured] == [20, 40]
    assert ended.measured[-1]["paper"] > 0.5 > ended.measured[-1]["momentum 0.001"]
    assert EXPERIMENT.findings(run).outcome == "unclear"  # the other net is missing
