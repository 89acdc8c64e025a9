"""Gradients, rates and landscapes, measured by probes and by twins written with plain autograd."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import normkit as nk
from support.watched_run import WatchedRun, small_net


def without_dropout(norm=nk.BatchNorm2d):
    return nn.Sequential(*(layer for layer in small_net(norm) if not isinstance(layer, nn.Dropout)))


def loss_and_gradient(model, values, batch):
    """The loss at other parameters, and its gradient by name, from operators alone."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = F.cross_entropy(functional_call(model, {**leaves, **buffers}, (batch[0],)), batch[1])
    return loss.item(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def norm(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def now(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_gradient_norms():
    run = WatchedRun(small_net())
    with nk.attach(run.model, nk.probes.GradientNorms(), 1, run.optimizer) as recorder:
        before = now(run.model)
        run.step(0)
    found = {record["layer"]: record for record in recorder.records}
    assert list(found) == ["0", "1", "4", "5", "8"]
    for name, layer in run.model.named_children():
        if name in found:
            own = [n for n, _ in layer.named_parameters(prefix=name)]
            gradient = norm([p.grad for p in layer.parameters()])
            weight = norm([before[n] for n in own])
            assert found[name]["gradient"] == pytest.approx(gradient, rel=1e-9)
            assert found[name]["ratio"] == pytest.approx(gradient / weight, rel=1e-9)


@pytest.mark.parametrize("kind", [nk.BatchNorm2d, nn.BatchNorm2d, nn.Identity], ids=["ours", "torch's", "plain"])
def test_landscape(kind):
    run = WatchedRun(without_dropout(kind) if kind is not nn.Identity else without_dropout(lambda c: nn.Identity()))
    with nk.attach(run.model, nk.probes.Landscape(run.loss, (0.5, 4.0), 3), 1, run.optimizer) as recorder:
        values = now(run.model)
        run.step(0)
    (found,) = recorder.records
    rate = run.optimizer.param_groups[0]["lr"]
    start, gradient = loss_and_gradient(run.model, values, run.batch)
    losses, changes, ratios = [], [], []
    for steps in (0.5, 2.25, 4.0):
        moved = {name: value - steps * rate * gradient[name] for name, value in values.items()}
        loss, other = loss_and_gradient(run.model, moved, run.batch)
        losses.append(loss)
        changes.append(norm([gradient[name] - other[name] for name in gradient]))
        ratios.append(changes[-1] / norm([moved[name] - values[name] for name in values]))
    expected = {
        "loss": start,
        "loss_low": min(losses),
        "loss_high": max(losses),
        "gradient": norm(gradient.values()),
        "change_low": min(changes),
        "change_high": max(changes),
        "smoothness": max(ratios),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("options", [{"span": (0, 1)}, {"span": (2, 1)}, {"points": 0}])
def test_a_landscape_of_nothing(options):
    with pytest.raises(nk.ArgumentError, match="span must be two lengths"):
        nk.probes.Landscape(lambda: None, **options)
    with pytest.raises(nk.ArgumentError, match="closure must be a function that returns the loss; got a Tensor"):
        nk.probes.Landscape(torch.ones(()))


@pytest.mark.parametrize("kind", [nk.BatchNorm2d, nn.BatchNorm2d], ids=["ours", "torch's"])
def test_covariate_shift_is_definition_2_1(kind):
    run = WatchedRun(without_dropout(kind), rate=0.5)
    with nk.attach(run.model, nk.probes.CovariateShift(run.loss), 1, run.optimizer) as recorder:
        old = now(run.model)
        run.step(0)
    new = now(run.model)
    found = {record["layer"]: record for record in recorder.records}
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in old))
    assert list(found) == layers
    _, gradients = loss_and_gradient(run.model, old, run.batch)
    for i, layer in enumerate(layers):
        mixed = {name: (new if name.rpartition(".")[0] in layers[:i] else old)[name] for name in old}
        _, others = loss_and_gradient(run.model, mixed, run.batch)
        own = [name for name in old if name.rpartition(".")[0] == layer]
        g, h = ([of[name].double() for name in own] for of in (gradients, others))
        shift = norm([a - b for a, b in zip(g, h, strict=True)])
        assert found[layer]["shift"] == pytest.approx(shift, rel=1e-3, abs=1e-5)
        assert found[layer]["relative"] == pytest.approx(shift / norm(g), rel=1e-3, abs=1e-5)
        cosine = sum((a * b).sum().item() for a, b in zip(g, h, strict=True)) / (norm(g) * norm(h))
        assert found[layer]["cosine"] == pytest.approx(cosine, abs=1e-4)
    assert found[layers[0]]["shift"] == 0  # nothing comes before it
    assert found[layers[-1]]["shift"] > 0


def test_covariate_shift_of_some_layers_sees_the_others_move():
    run = WatchedRun(without_dropout(), rate=0.5)
    probe = nk.probes.CovariateShift(run.loss, layers="7")
    with nk.attach(run.model, probe, 1, run.optimizer) as recorder:
        run.step(0)
    (record,) = recorder.records
    assert record["layer"] == "7"
    assert record["shift"] > 0


def test_dropout_drops_the_same_units_in_all_evaluations():
    """Else the first layer, before which nothing moves, would have a shift."""
    run = WatchedRun(small_net(lambda c: nn.Dropout(0.5)))
    with nk.attach(run.model, nk.probes.CovariateShift(run.loss), 1, run.optimizer) as recorder:
        run.step(0)
    assert recorder.records[0]["shift"] == 0


def test_effective_rate():
    run = WatchedRun(small_net(), rate=0.3, momentum=0.0, decay=0.01)
    with nk.attach(run.model, nk.probes.EffectiveRate(), 1, run.optimizer) as recorder:
        old = now(run.model)
        run.step(0)
    found = {record["layer"]: record for record in recorder.records}
    assert list(found) == ["0", "4", "8"]
    for name, record in found.items():
        w, v = (of.double().flatten() for of in (old[f"{name}.weight"], run.model[int(name)].weight.detach()))
        g = run.model[int(name)].weight.grad.double().flatten()
        assert record["norm"] == pytest.approx(w.norm().item(), rel=1e-9)
        assert record["effective_rate"] == pytest.approx(0.3 / w.norm().item() ** 2, rel=1e-9)
        assert record["angle"] == pytest.approx(math.acos((w @ v / (w.norm() * v.norm())).item()), rel=1e-4)
        assert record["equilibrium_angle"] == pytest.approx(math.sqrt(2 * 0.3 * 0.01), rel=1e-12)
        fourth = 0.3 * (g.norm() * w.norm()).item() ** 2 / (2 * 0.01)
        assert record["equilibrium_norm"] == pytest.approx(fourth**0.25, rel=1e-9)
    assert abs(found["0"]["radial"]) < 1e-5  # a norm follows
    assert abs(found["8"]["radial"]) > 1e-4  # none does


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.deep), 0.9])
def test_the_equilibrium_is_where_decay_and_gradients_balance(momentum):
    """A weight whose loss is indifferent to its scale, with gradients of one size: it must end where it says."""
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum, weight_decay=0.02)
    with nk.attach(layer, nk.probes.EffectiveRate(), 1, optimizer) as recorder:
        for _ in range(3000):  # six times 1 / (rate * decay)
            w = layer.weight.detach()
            g = torch.randn_like(w)
            g -= (g * w).sum() / w.square().sum() * w
            layer.weight.grad = g / (g.norm() * w.norm())
            optimizer.step()
    last = recorder.records[-200:]
    norm_of, angle = (sum(record[key] for record in last) / len(last) for key in ("norm", "angle"))
    assert norm_of == pytest.approx(last[-1]["equilibrium_norm"], rel=0.02)
    assert angle == pytest.approx(last[-1]["equilibrium_angle"], rel=0.02)


def test_what_is_not_plain_sgd_has_no_prediction():
    layer = nn.Linear(3, 3)
    for optimizer in (
        torch.optim.AdamW(layer.parameters()),
        torch.optim.SGD(layer.parameters(), lr=0.1),
        torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ):
        with nk.attach(layer, nk.probes.EffectiveRate(), 1, optimizer) as recorder:
            layer(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        assert recorder.records[0]["equilibrium_norm"] is None
        assert recorder.records[0]["rate"] == optimizer.param_groups[0]["lr"]


def test_a_layer_that_the_optimizer_does_not_have():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with nk.attach(model, nk.probes.EffectiveRate(), 1, optimizer) as recorder:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    first, second = recorder.records
    assert "rate" in first
    assert "rate" not in second
    assert second["angle"] == 0
