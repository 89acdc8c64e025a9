"""What goes through layers, measured by probes and by hand."""

import math

import numpy
import pytest
import torch
from torch import nn

import normkit as nk
from support.case import randomize_


def watch(model, probe, *inputs):
    """The records of one forward for each input."""
    with nk.attach(model, probe, every=1) as recorder:
        for x in inputs:
            model(x)
            recorder.step()
    assert recorder.stopped == {}
    return recorder.records


def test_quantiles_of_all_values_and_of_a_unit():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(5, 3, 7, 7)
    y = layer(x).detach().numpy()
    (all_values,) = watch(layer, nk.probes.ActivationQuantiles((0.15, 0.5, 0.85)), x)
    for key, q in (("q15", 0.15), ("q50", 0.5), ("q85", 0.85)):
        assert all_values[key] == pytest.approx(numpy.quantile(y, q), rel=1e-5, abs=1e-6)
    (unit,) = watch(layer, nk.probes.ActivationQuantiles([0.125], unit=2), x)
    assert unit["q12.5"] == pytest.approx(numpy.quantile(y[:, 2], 0.125), rel=1e-5, abs=1e-6)
    (entered,) = watch(layer, nk.probes.ActivationQuantiles([0.5], of="input"), x)
    assert entered["q50"] == pytest.approx(numpy.quantile(x.numpy(), 0.5), rel=1e-5, abs=1e-6)


def test_quantiles_of_more_values_than_are_sorted():
    x = torch.randn(1, 1, 700, 700)
    (found,) = watch(nn.Sequential(nn.InstanceNorm2d(1)), nk.probes.ActivationQuantiles([0.5], of="input"), x)
    assert found["q50"] == pytest.approx(x.median().item(), abs=0.02)  # of some 65,000: five standard errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantiles": ()}, "between 0 and 1"),
        ({"quantiles": [1.5]}, r"between 0 and 1; got \(1.5,\)"),
        ({"of": "gradient"}, '"output" or "input"; got \'gradient\''),
    ],
)
def test_quantiles_that_there_are_none_of(options, message):
    with pytest.raises(nk.ArgumentError, match=message):
        nk.probes.ActivationQuantiles(**options)


def test_a_unit_that_is_not_there():
    layer = nn.Linear(2, 3)
    with (
        nk.attach(layer, nk.probes.ActivationQuantiles(unit=3), every=1),
        pytest.warns(nk.NormkitWarning, match="unit 3 of : it has 3 channels"),
    ):
        layer(torch.randn(4, 2))


def test_moments_and_their_drift():
    layer = nn.Linear(3, 4)
    x, other = torch.randn(20, 3), torch.randn(30, 3) * 2 + 1
    first, second = watch(layer, nk.probes.ActivationMoments(), x, other)
    ys = [layer(t).detach().double() for t in (x, other)]
    assert first["mean"] == pytest.approx(ys[0].mean().item(), rel=1e-6)
    assert first["std"] == pytest.approx(ys[0].std(correction=0).item(), rel=1e-6)
    assert (first["mean_drift"], first["std_drift"]) == (None, None)
    means, stds = zip(*((y.mean(0), y.std(0, correction=0)) for y in ys), strict=True)
    expected = ((means[1] - means[0]) / stds[0]).square().mean().sqrt().item()
    assert second["mean_drift"] == pytest.approx(expected, rel=1e-6)
    assert second["std_drift"] == pytest.approx((stds[1] / stds[0]).log().square().mean().sqrt().item(), rel=1e-6)


def test_constant_channels_have_no_drift():
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.zero_()
    _, second = watch(layer, nk.probes.ActivationMoments(), torch.randn(5, 3), torch.randn(5, 3))
    assert (second["mean_drift"], second["std_drift"]) == (None, None)


@pytest.mark.parametrize(
    ("layer", "x", "dead", "zero", "saturated"),
    [
        (nn.ReLU(), [[-1.0, 2, -3], [-2.0, -1, -1]], 2 / 3, 5 / 6, None),
        (nn.Sigmoid(), [[9.0, 0, 9], [-9.0, 0, 0]], 1 / 3, 0, 0.5),
        (nn.Tanh(), [[9.0, 0, 0.1]], 1 / 3, 1 / 3, 1 / 3),
        (nn.ReLU6(), [[7.0, 3, -1]], 2 / 3, 1 / 3, 2 / 3),
        (nn.Hardtanh(-2, 2), [[7.0, 1.5, -9]], 2 / 3, 0, 2 / 3),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_dead_and_saturated_units(layer, x, dead, zero, saturated):
    (found,) = watch(nn.Sequential(layer), nk.probes.DeadUnits(), torch.tensor(x))
    assert found["dead"] == pytest.approx(dead)
    assert found["zero"] == pytest.approx(zero)
    assert found["saturated"] == (None if saturated is None else pytest.approx(saturated))


def test_a_norm_that_applies_its_activation_itself():
    layer = nk.BatchNorm1d(3, activation="relu")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.0, 1.0]))
        layer.bias.copy_(torch.tensor([0.0, -1.0, 50.0]))
    (found,) = watch(layer, nk.probes.DeadUnits(), torch.randn(16, 3))
    assert found["dead"] == pytest.approx(1 / 3)
    assert found["layer"] == ""


@pytest.mark.parametrize("build", [lambda: nk.BatchNorm2d(3), lambda: nn.BatchNorm2d(3)], ids=["ours", "torch's"])
def test_noise_of_the_statistics(build):
    layer = randomize_(build())
    xs = [torch.randn(n, 3, 5, 5) * s + m for n, s, m in ((4, 1.0, 0.5), (6, 2.0, 0.0), (5, 1.5, 1.0))]
    records = watch(layer, nk.probes.StatisticsNoise(), *xs)
    assert (records[0]["mean_noise"], records[0]["std_noise"]) == (None, None)
    channels = [x.double().movedim(1, 0).flatten(1) for x in xs]
    for i in (1, 2):
        before = torch.cat(channels[:i], 1)
        mean, std = before.mean(1), before.std(1, correction=0)
        own = channels[i]
        gap = (own.mean(1) - mean) / std
        assert records[i]["mean_noise"] == pytest.approx(gap.square().mean().sqrt().item(), rel=1e-9)
        ratio = (own.std(1, correction=0) / std).log()
        assert records[i]["std_noise"] == pytest.approx(ratio.square().mean().sqrt().item(), rel=1e-9)
        assert records[i]["expected"] == pytest.approx(1 / math.sqrt(own.shape[1]))
        assert records[i]["values"] == own.shape[1]
    gap = (channels[2].mean(1) - layer.running_mean.double()) / layer.running_var.double().sqrt()
    assert records[2]["stored_gap"] == pytest.approx(gap.square().mean().sqrt().item(), rel=1e-6)


def test_of_independent_values_the_noise_is_the_expected():
    layer = nn.BatchNorm1d(400)
    records = watch(layer, nk.probes.StatisticsNoise(memory=1000), *(torch.randn(64, 400) for _ in range(30)))
    noise = [record["mean_noise"] / record["expected"] for record in records[10:]]
    # Of 8,000 means, and with a population of ten to thirty batches: one tenth to a thirtieth more, and 1% of luck.
    assert 0.97 < sum(n**2 for n in noise) / len(noise) < 1.13


def test_an_old_population_is_forgotten():
    layer, far = nn.BatchNorm1d(4), torch.randn(32, 4) + 100
    xs = [far] + [torch.randn(32, 4) for _ in range(40)]
    long, short = nk.probes.StatisticsNoise(memory=1000), nk.probes.StatisticsNoise(memory=2)
    kept = watch(layer, long, *xs)[-1]["mean_noise"]
    pooled = torch.cat(xs[:-1]).double()
    expected = ((xs[-1].double().mean(0) - pooled.mean(0)) / pooled.std(0, correction=0)).square().mean().sqrt().item()
    assert kept == pytest.approx(expected, rel=1e-9)
    watch(layer, short, *xs)
    (_, remembered, _), (_, forgotten, _) = long.state()[""], short.state()[""]
    assert remembered.min() > 100  # one batch in 41 lies 100 deviations away
    assert forgotten.max() < 5


def test_values_that_are_not_numbers_are_said():
    class Counting(nn.Module):
        def forward(self, x):
            return x.long()

    with (
        nk.attach(Counting(), nk.probes.ActivationMoments(""), every=1) as recorder,
        pytest.warns(nk.NormkitWarning, match="no tensor of floating point numbers"),
    ):
        recorder._watched.model(torch.randn(3))
