"""Adapting repairs a shift, says what it watched, and takes back what went wrong."""

import copy
import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.moments import Moments
from normkit.surgery.statistics.adapt import adapt
from normkit.surgery.statistics.collect import BatchError
from normkit.surgery.statistics.drift import drift
from normkit.surgery.statistics.recalibrate import recalibrate
from support.case import randomize_
from support.look_alikes import Lengths
from support.model_state import assert_same, everything
from support.warned import warned

CLASSES, FEATURES = 4, 8


def examples(count, generator=None):
    """Four clouds of points, and which of them each is from."""
    generator = generator or torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 2
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return centres[labels] + torch.randn(count, FEATURES, generator=generator), labels


def shifted(x):
    """What another camera would give: every feature on a scale of its own."""
    own = torch.Generator().manual_seed(2)
    return x * (0.3 + 2 * torch.rand(FEATURES, generator=own)) + 4 * torch.randn(FEATURES, generator=own)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 16), nk.BatchNorm1d(16, activation="relu"), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(16, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(3)
    for _ in range(150):
        x, y = examples(64, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.train()


@pytest.fixture
def target():
    x, _ = examples(480)
    return list(shifted(x).split(60))


def accuracy(model):
    x, y = examples(1000, torch.Generator().manual_seed(9))
    return (copy.deepcopy(model).eval()(shifted(x)).argmax(1) == y).float().mean().item()


def stored(layer):
    return layer.running_mean.double(), layer.running_var.double()


# ---- what it does


def test_a_shift_is_repaired(trained, target):
    before = accuracy(trained)
    statistics, stepped = adapt(trained, target), adapt(trained, target, "tent", epochs=3)
    assert before < 0.7
    assert accuracy(statistics.model) > before + 0.25
    assert accuracy(stepped.model) > before + 0.25
    assert [change.layer for change in statistics.changed] == ["0", "2"]
    assert statistics.skipped == stepped.skipped == []


def test_adabn_without_a_prior_is_recalibration(trained, target):
    one, other = adapt(trained, target).model.state_dict(), recalibrate(trained, target).model.state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_prior_weighs_as_many_examples(trained, target):
    few = target[0][:20]
    old = stored(trained[0])
    new = few.double().mean(0), few.double().var(0)
    found = stored(adapt(trained, [few], prior=60).model[0])
    for mixed, source, own in zip(found, old, new, strict=True):
        torch.testing.assert_close(mixed, 0.75 * source + 0.25 * own, rtol=1e-6, atol=1e-6)


def test_few_examples_are_better_off_with_a_prior():
    """With a prior of 12 examples the 4 weigh a quarter, so that the squared error of the mean falls to a sixteenth."""
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(200).eval()  # what it stores is right
    few = torch.randn(4, 200)
    alone, held = (adapt(layer, [few], prior=prior, logits=None).model for prior in (0, 12))
    assert held.running_mean.square().mean() < 0.1 * alone.running_mean.square().mean()


def test_tent_lowers_the_entropy_by_gamma_and_beta_alone(trained, target):
    found = adapt(trained, target, "tent", lr=0.01, epochs=2)
    before, after = trained.state_dict(), found.model.state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert {key.split(".")[0] for key in moved} == {"0", "2"}
    assert {key.split(".")[1] for key in moved} == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }

    def entropy(model):
        logs = copy.deepcopy(model).eval()(torch.cat(target)).log_softmax(1)
        return -(logs.exp() * logs).sum(1).mean().item()

    assert entropy(found.model) < entropy(adapt(trained, target).model)
    assert all("gamma and beta stepped" in change.what for change in found.changed)


def test_tent_steps_are_those_of_the_method_written_out(trained, target):
    """One step of plain gradient descent, against autograd on a model in which only the norms train."""
    found = adapt(trained, target[:1], "tent", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)).model
    twin = copy.deepcopy(trained).eval()
    twin[0].train()
    twin[2].train()
    affine = [twin[0].weight, twin[0].bias, twin[2].weight, twin[2].bias]
    chances = twin(target[0]).softmax(1)
    grads = torch.autograd.grad(-(chances * chances.log()).sum(1).mean(), affine)
    own = [found[0].weight, found[0].bias, found[2].weight, found[2].bias]
    for new, old, grad in zip(own, affine, grads, strict=True):
        torch.testing.assert_close(new, old - 0.1 * grad, rtol=1e-4, atol=1e-6)


def test_after_tent_statistics_are_those_of_the_target(trained, target):
    found = adapt(trained, target, "tent", lr=0.01).model
    again = recalibrate(found, target).model
    for key, value in again.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], value)


def test_tent_takes_norms_without_statistics_too(target):
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES))
    model[0].unused = nn.LayerNorm(3)
    found = warned(adapt, model, target, "tent", lr=0.01)
    assert [(change.layer, change.what) for change in found.changed] == [
        ("1", "gamma and beta stepped"),
        ("2", "gamma and beta stepped"),
    ]
    assert found.skipped == [("0.unused", "gamma and beta stepped", "no gradient came to it")]
    assert not torch.equal(found.model[1].weight, model[1].weight)


def test_tent_takes_norms_that_others_wrote(target):
    model = nn.Sequential(nn.Linear(FEATURES, 6), Lengths(6), nn.Linear(6, CLASSES))
    found = adapt(model, target, "tent", lr=0.01)
    assert [change.layer for change in found.changed] == ["1"]
    assert not torch.equal(found.model[1].g, model[1].g)


@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_modes_gradients_and_undo(trained, target, method):
    model = copy.deepcopy(trained)
    model[2].eval()
    model[2].weight.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = [p.grad for p in model.parameters()]
    before = everything(model)
    found = adapt(model, target, method, inplace=True, example=target[0])
    assert found.model is model
    assert found.changed
    assert found.parity.max_abs > 0
    assert everything(model)[1:] == before[1:]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert found.undo() is model
    assert_same(before, everything(model))
    copied = adapt(model, target, method)
    assert_same(before, everything(model))
    assert copied.undo() is model


# ---- what it watches


def test_drift_is_half_the_divergence_both_ways():
    def divergence(m, v, n, w):
        return 0.5 * (math.log(w / v) + (v + (m - n) ** 2) / w - 1)

    old, new = (
        Moments(torch.tensor([0.3, 1.0]), torch.tensor([2.0, 1.0]), 0),
        Moments(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 1.0]), 0),
    )
    expected = (divergence(0.3, 2.1, 1.0, 0.6) + divergence(1.0, 0.6, 0.3, 2.1)) / 2
    found = drift(old, new, 0.1)
    assert found.worst == pytest.approx(expected)
    assert found.mean == pytest.approx(expected / 2)


def test_drift_and_entropies_are_told(trained, target):
    change = adapt(trained, target).changed[0]
    assert "drift" in change.why
    assert "nats" in change.why
    assert "of the mean prediction" in change.why
    assert "classes, now entropy" in change.why


class ToOneClass(torch.optim.SGD):
    """Steps that leave nothing of the input: whatever it is, one class is certain."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for gamma, beta in zip(parameters[::2], parameters[1::2], strict=True):
            gamma.zero_()
            beta.fill_(1e4)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_collapse_is_rolled_back(trained, target, inplace):
    model = copy.deepcopy(trained)
    before = everything(model)
    found = warned(adapt, model, target, "tent", optimizer=ToOneClass, inplace=inplace, example=target[0])
    assert found.changed == []
    assert [skipped.layer for skipped in found.skipped] == ["0", "2"]
    assert all("rolled back: predictions collapsed, from entropy" in skipped.why for skipped in found.skipped)
    assert_same(before, everything(found.model))
    assert_same(before, everything(model))
    assert found.parity == (0.0, 0.0, None)
    assert found.undo() is model
    watched = adapt(model, target, "tent", optimizer=ToOneClass, collapse=0.0)
    assert watched.changed  # it was that, and nothing else, which took it back
    assert accuracy(watched.model) < 0.5


def test_statistics_that_collapse_predictions_are_rolled_back():
    """A norm whose new statistics push all examples over to one class."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(10 * torch.eye(2))
        model[1].bias.copy_(torch.tensor([100.0, 0.0]))
        model[0].running_mean.copy_(torch.tensor([11.0, 0.0]))
    x = torch.randn(40, 2)
    x[:, 0] += 1
    assert len(model.eval()(x).argmax(1).unique()) == 2
    found = warned(adapt, model, [x])
    assert found.changed == []
    assert "predictions collapsed" in found.skipped[0].why


def test_steps_that_raise_the_entropy_are_rolled_back(trained, target):
    def upwards(parameters):
        return torch.optim.SGD(parameters, lr=2.0, maximize=True)

    found = warned(adapt, trained, target, "tent", optimizer=upwards)
    assert found.changed == []
    assert all("were to lower the entropy raised it" in skipped.why for skipped in found.skipped)


def test_a_drift_that_is_too_far_is_rolled_back(trained, target):
    before = everything(trained)
    found = warned(adapt, trained, target, max_drift=0.01)
    assert found.changed == []
    assert "0 (BatchNorm1d): drift" in found.skipped[0].why
    assert "at most 0.01 was allowed" in found.skipped[1].why
    assert_same(before, everything(found.model))
    assert adapt(trained, target, max_drift=1e6).changed


@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_nan_is_rolled_back(trained, target, method):
    target[3][2, 1] = torch.nan
    found = warned(adapt, trained, target, method)
    assert found.changed == []
    assert "batch 3 (the first is 0): 0 (BatchNorm1d) needs finite input" in found.skipped[0].why
    assert_same(everything(trained), everything(found.model))


def test_statistics_that_were_nan_are_replaced_and_no_prior(trained, target):
    model = copy.deepcopy(trained)
    model[0].running_mean[1] = torch.nan
    found = adapt(model, target)
    assert "entropy nan" in found.changed[0].why
    assert accuracy(found.model) == accuracy(adapt(trained, target).model)
    with pytest.raises(nk.ArgumentError, match=r"0 \(BatchNorm1d\) stores NaN or infinity"):
        adapt(model, target, prior=3)


def test_steps_to_infinity_are_rolled_back(trained, target):
    found = warned(adapt, trained, target, "tent", lr=1e30, epochs=4, collapse=0.0)
    assert found.changed == []
    assert "rolled back" in found.skipped[0].why


# ---- outputs and layers of other kinds


def test_outputs_that_are_no_predictions_are_not_watched(target):
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
    found = adapt(model, target)
    assert len(found.changed) == 1
    assert "entropy" not in found.changed[0].why
    many = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3))
    assert "entropy" not in adapt(many, target, logits=None).changed[0].why


def test_logits_are_found_where_they_are_said_to_be(trained, target):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trained

        def forward(self, x):
            return {"features": x, "logits": self.inner(x)}

    found = adapt(Named(), target, "tent", logits=lambda output: output["logits"])
    expected = adapt(trained, target, "tent")
    for key, value in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.inner.state_dict()[key], value)


def test_classes_that_are_ruled_out_add_nothing(trained, target):
    def ruled_out(logits):
        return torch.cat([logits, torch.full((len(logits), 1), -torch.inf)], 1)

    found, expected = adapt(trained, target, "tent", logits=ruled_out), adapt(trained, target, "tent")
    for key, value in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[key], value)
    assert found.changed == expected.changed


def test_maps_of_predictions(target):
    model = randomize_(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, CLASSES, 1)))
    found = adapt(model, [torch.randn(4, 3, 5, 5), torch.randn(2, 3, 5, 5)], "tent", collapse=0.0)
    assert "entropy" in found.changed[0].why


@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_frozen_and_unreached_norms_are_skipped(trained, target, method):
    model = nn.ModuleDict(
        {"used": copy.deepcopy(trained), "frozen": nk.FrozenBatchNorm1d(3), "unused": nn.BatchNorm1d(3)}
    )
    found = warned(adapt, model, target, method, lambda model, x: model["used"](x))
    assert {skipped.layer: skipped.why for skipped in found.skipped} == {
        "frozen": "is frozen; unfreeze the model first",
        "unused": "was not reached by any batch",
    }
    assert torch.equal(found.model["unused"].weight, model["unused"].weight)


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adbn"}, r'got \'adbn\'\. Did you mean "adabn"\?'),
        ({"method": "zzz"}, r"got 'zzz'\.$"),
        ({"prior": -1}, "prior must be 0 examples or more; got -1"),
        ({"prior": math.inf}, "prior must be"),
        ({"method": "tent", "lr": 0}, "lr must be positive; got 0"),
        ({"method": "tent", "epochs": 0}, "epochs must be 1 or more; got 0"),
        ({"collapse": 2}, r"collapse must be in 0\.\.1; got 2"),
        ({"batches": []}, "there are no batches"),
        ({"batches": iter([torch.randn(5, FEATURES)])}, "adapt iterates over the batches more than once"),
        ({"logits": lambda output: output[:, 0]}, r"logits must return a tensor \(N, classes\).*got \(60,\)"),
        ({"method": "tent", "logits": None}, "needs logits"),
        ({"method": "tent", "forward": lambda model, x: model(x).detach()}, "does not depend on gamma and beta"),
    ],
)
def test_bad_arguments_change_nothing(trained, target, options, message):
    model = copy.deepcopy(trained)
    before = everything(model)
    with pytest.raises(nk.ArgumentError, match=message):
        adapt(model, **{"batches": target, "inplace": True} | options)
    assert_same(before, everything(model))


def test_tent_needs_something_to_step_on(target):
    model = nn.Sequential(nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(nk.ArgumentError, match=r'no norm of this model has them as parameters\. Use "adabn"'):
        adapt(model, target, "tent")
    assert adapt(model, target).changed
    conv = nn.Sequential(nk.ScaledStdConv2d(3, 4, 1), nn.Flatten())  # whose weight is no gamma
    with pytest.raises(nk.ArgumentError, match="no norm of this model"):
        adapt(conv, [torch.randn(2, 3, 2, 2)], "tent")


@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_a_batch_that_fails_half_way_loses_nothing(trained, target, method):
    model, calls = copy.deepcopy(trained), []

    def forward(model, x):
        calls.append(1)
        if len(calls) > 2.5 * len(target):
            raise OSError("gone")
        return model(x)

    before = everything(model)
    with pytest.raises(BatchError, match=r"batch 4 \(the first is 0\) failed: OSError: gone"):
        adapt(model, target, method, forward, inplace=True)
    assert_same(before, everything(model))
