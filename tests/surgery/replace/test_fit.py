"""Gamma and beta fitted on batches, against numpy's least squares, and what it does for a trained net."""

import copy
import re

import numpy
import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.data import load
from normkit.surgery.replace.convert import convert
from support.case import randomize_
from support.foreign_norms import BatchNormAct2d, picture, same_picture


def share(change):
    return float(re.search(r"fitted: ([\d.]+)% of the old output's variance", change.why)[1]) / 100


def least_squares(x, y):
    """Per channel of (N, C, ...), by numpy: slope, intercept and share of the variance explained."""
    rows = []
    for channel in range(x.shape[1]):
        a, b = (t[:, channel].flatten().double().numpy() for t in (x, y))
        (slope, intercept), *_ = numpy.linalg.lstsq(numpy.stack([a, numpy.ones_like(a)], 1), b, rcond=None)
        rows.append((slope, intercept, ((b - slope * a - intercept) ** 2).sum(), ((b - b.mean()) ** 2).sum()))
    table = numpy.array(rows)
    return torch.tensor(table[:, 0]), torch.tensor(table[:, 1]), 1 - table[:, 2].sum() / table[:, 3].sum()


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("to", ["group", "instance", "layer", "filter-response"])
def test_it_is_least_squares_over_all_batches(to, activation):
    """Of the output before the activation, whatever the sizes of the batches."""
    layer = randomize_(nk.BatchNorm2d(6, eps=0.02, activation=activation)).double()
    batches = [torch.randn(n, 6, 4, 3).double() * 2 + 1 for n in (5, 3, 8)]
    done = convert(layer, to, calibrate=batches)
    x = torch.cat(batches)
    plain = nn.functional.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=0.02)
    normalized = {
        "group": lambda: nn.functional.group_norm(x, 3, eps=0.02),
        "instance": lambda: nn.functional.instance_norm(x, eps=0.02),
        "layer": lambda: nn.functional.layer_norm(x, x.shape[1:], eps=0.02),
        "filter-response": lambda: x / (x.square().mean((2, 3), keepdim=True) + 0.02).sqrt(),
    }[to]()
    gamma, beta, explained = least_squares(normalized, plain.detach())
    torch.testing.assert_close(done.model.weight.detach(), gamma, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(done.model.bias.detach(), beta, rtol=1e-9, atol=1e-9)
    assert share(done.changed[0]) == pytest.approx(explained, abs=6e-4)


def test_half_an_affine_is_fitted_by_itself():
    batches = [torch.randn(9, 6, 4, 3).double() + 0.5]
    x = torch.cat(batches)
    normalized = nn.functional.group_norm(x, 3)
    for affine in ("scale", "shift"):
        layer = randomize_(nk.BatchNorm2d(6, affine=affine)).double().eval()
        y = layer(x).detach()
        new = convert(layer, "group", calibrate=batches).model
        if affine == "scale":
            expected = (normalized * y).sum((0, 2, 3)) / normalized.square().sum((0, 2, 3))
            torch.testing.assert_close(new.weight.detach(), expected)
        else:
            torch.testing.assert_close(new.bias.detach(), (y - normalized).mean((0, 2, 3)))


def test_layer_norm_to_rms_norm():
    layer = randomize_(nn.LayerNorm(6, eps=0.01)).double()
    x = torch.randn(7, 5, 6).double()
    done = convert(nn.Sequential(layer), "rms", calibrate=[x[:3], x[3:]])
    normalized = nn.functional.rms_norm(x, (6,), eps=0.01)
    expected = (normalized * layer(x)).sum((0, 1)) / normalized.square().sum((0, 1))
    torch.testing.assert_close(done.model[0].weight, expected.detach(), check_dtype=True)


@pytest.mark.parametrize("to", ["batch", "sync", "renorm"])
def test_statistics_come_from_the_batches_where_there_were_none(to):
    layer = randomize_(nn.GroupNorm(2, 6)).double()
    batches = [torch.randn(n, 6, 4, 3).double() * 2 + 1 for n in (5, 3)]
    x = torch.cat(batches)
    done = convert(nn.Sequential(layer), to, x, calibrate=batches, only="0")
    new, values = done.model[0], x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(new.running_mean, values.mean(1))
    torch.testing.assert_close(new.running_var, values.var(1))
    assert new.num_batches_tracked == 2
    slope, intercept, explained = least_squares(x, layer(x).detach())
    torch.testing.assert_close(done.model.eval()(x).detach(), x * slope.view(-1, 1, 1) + intercept.view(-1, 1, 1))
    assert share(done.changed[0]) == pytest.approx(explained, abs=6e-4)


def test_statistics_far_from_zero_do_not_cancel():
    """The squares of these inputs have 12 digits before the variance begins, which float64 cannot spare."""
    batches = [torch.randn(n, 3, 8, 8) + 1e6 for n in (16, 64, 5)]
    x = torch.cat(batches).double()
    done = convert(nn.Sequential(nn.GroupNorm(1, 3)), "batch", batches[0], calibrate=batches)
    new, values = done.model[0], x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(new.running_mean.double(), values.mean(1), rtol=1e-7, atol=0)
    torch.testing.assert_close(new.running_var.double(), values.var(1), rtol=1e-6, atol=0)
    slope, _, explained = least_squares(x - 1e6, nn.functional.group_norm(x, 1))
    std = (values.var(1) + new.eps).sqrt()
    torch.testing.assert_close(new.weight.detach().double(), slope * std, rtol=1e-5, atol=0)
    assert share(done.changed[0]) == pytest.approx(explained, abs=6e-4)


def test_every_layer_sees_what_the_original_gave_it_and_the_model_is_left_alone():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), randomize_(BatchNormAct2d(8, nn.ReLU(inplace=True))), nn.Dropout(), nn.Conv2d(8, 8, 1)
    ).append(randomize_(nn.BatchNorm2d(8)))
    batches = [torch.randn(5, 3, 4, 4) for _ in range(3)]
    before, state = picture(model), torch.get_rng_state()
    done = convert(model, "group", batches[0], calibrate=batches)
    assert same_picture(picture(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        seen = model.eval()[:4](torch.cat(batches))
        gamma, beta, _ = least_squares(nn.functional.group_norm(seen, 4), model[4](seen))
    torch.testing.assert_close(done.model[4].weight, gamma.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(done.model[4].bias, beta.float(), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_fitted_says_so():
    class Lonely(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.unused, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)

        def forward(self, x):
            return self.plain(self.bn(x))

    done = convert(Lonely(), "group", calibrate=[torch.randn(3, 4, 5, 5)])
    assert "fitted" in done.changed[0].why
    assert "no batch reached it" in done.changed[1].why
    assert "no gamma or beta to fit" in done.changed[2].why


def test_dead_channels_and_constant_batches_stay_finite():
    layer = randomize_(nn.BatchNorm2d(4))
    x = torch.randn(3, 4, 5, 5)
    x[:, :2] = 1.5
    done = convert(layer, "group", calibrate=[x])
    assert all(t.isfinite().all() for t in done.model.state_dict().values())
    assert torch.isfinite(done.model(x)).all()


def test_batches_with_nan_are_refused():
    model = nn.Sequential(randomize_(nn.BatchNorm2d(4)))
    before = picture(model)
    with pytest.raises(nk.NonFiniteError, match="calibrate needs finite values; on these batches '0'"):
        convert(model, "group", calibrate=[torch.full((2, 4, 3, 3), torch.nan)], inplace=True)
    assert same_picture(picture(model), before)


@pytest.fixture(scope="module")
def fashion():
    """Training and test pictures of Fashion-MNIST, at half their size, with labels."""
    data = load("fashion-mini")
    halved = [nn.functional.avg_pool2d(part.pixels.float() / 255, 2) for part in (data.train, data.test)]
    return halved[0], data.train.labels, halved[1][:300], data.test.labels[:300]


@pytest.fixture(scope="module")
def trained(fashion):
    """A small net after 120 steps, in evaluation."""

    def block(a, b, stride=1):
        return [nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    body = [*block(1, 16), *block(16, 32, 2), *block(32, 32)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    for _ in range(120):
        chosen = torch.randint(len(fashion[0]), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(fashion[0][chosen]), fashion[1][chosen]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.mark.parametrize(
    ("to", "options"),
    [("group", {}), ("group", {"groups": 2}), ("layer", {}), ("instance", {}), ("filter-response", {})],
)
@torch.no_grad()
def test_each_layer_of_a_trained_net_starts_closer(fashion, trained, to, options):
    """Than with gamma and beta copied, on what the original gives it: so much least squares warrant, of any net."""
    x = fashion[0][:300]
    inputs, watched = {}, copy.deepcopy(trained)
    for name, layer in watched.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda layer, args, name=name: inputs.update({name: args[0].clone()}))
    watched(x)
    copied = convert(trained, to, **options).model
    fitted = convert(trained, to, calibrate=x.split(64), **options)
    assert all(0 < share(change) < 1 for change in fitted.changed)
    for name, seen in inputs.items():
        old = trained.get_submodule(name)(seen)
        far, near = ((net.get_submodule(name)(seen) - old).square().mean() for net in (copied, fitted.model))
        assert near < far
