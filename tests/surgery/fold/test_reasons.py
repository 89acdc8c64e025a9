"""What folding leaves alone, and the words in which it says why."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.surgery.fold import fold
from support.fold_checks import Block, check, double, ready, reason


class Net(nn.Module):
    """A convolution and a norm, with whatever is done around them."""

    def __init__(self, run, **layers):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def _in_place(net, x):
    y = net.conv(x)
    y.mul_(2)
    return net.bn(y)


def _through_a_view(net, x):
    y = net.conv(x)
    y.view(-1)[::2].zero_()
    return net.bn(y)


def _stashed(net, x):
    net.last = net.conv(x)
    return net.bn(net.last)


def _through_a_list(net, x):
    y = net.conv(x)
    return net.bn(y) + torch.tensor(y.tolist(), dtype=y.dtype)


def _overwritten(net, x):
    x = x * 1
    y = net.bn(x)
    x.add_(1)
    return net.head(y) + x


REASONS = {
    "used elsewhere": (lambda net, x: net.bn(y := net.conv(x)) + y, "also used by add"),
    "used as data": (lambda net, x: net.bn(y := net.conv(x)) + y.data, "also used by add"),
    "a view used elsewhere": (lambda net, x: net.bn(y := net.conv(x)) + y[:, :1], "also used by add"),
    "changed in place": (_in_place, "also used by mul_"),
    "changed through a view": (_through_a_view, "also used by zero_"),
    "kept": (_stashed, "kept by the model"),
    "nonlinear before": (lambda net, x: net.bn(net.conv(x).relu()), "its input comes from relu"),
    "sum before": (lambda net, x: net.bn(net.conv(x) + x), "its input comes from add"),
    "maximum before": (lambda net, x: net.bn(F.max_pool2d(net.conv(x), 2)), "max_pool2d"),
    "channels mixed": (lambda net, x: net.bn(net.conv(x).mean(1, keepdim=True).repeat(1, 3, 1, 1)), "repeat"),
    "zeros before": (lambda net, x: net.bn(F.pad(net.conv(x), (1, 1))), "zeros are padded in between"),
    "layer used alone too": (lambda net, x: net.bn(net.conv(x)) + net.conv(x), "runs more than once"),
    "never run": (lambda net, x: net.conv(x), "does not run"),
    "hidden use": (_through_a_list, "would move by"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    run, words = REASONS[name]
    assert words in reason(ready(Net(run)), double(2, 3, 6, 6))


def test_an_intermediate_that_is_an_output():
    class Both(Block):
        def forward(self, x):
            y = self.conv(x)
            return {"features": [y], "out": self.bn(y)}

    (skipped,) = fold(ready(Both()), double(2, 3, 5, 5)).skipped
    assert "part of the model's output" in skipped.why


BEFORE = {
    "zero padding": (nn.Conv2d(3, 4, 3, padding=1), "zeros at the borders"),
    "padding of maps of one value": (nn.Conv2d(3, 4, 3, padding=1), "zeros at the borders"),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, stride=2), "zeros at the borders"),
    "transposed with gaps": (nn.ConvTranspose2d(3, 4, 1, stride=2), "zeros at the borders"),
    "padded apart": (nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3)), "zeros that are padded"),
    "counted padding": (nn.Sequential(nn.AvgPool2d(3, padding=1), nn.Conv2d(3, 4, 1)), "channels are mixed"),
    "nonlinear": (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1)), "goes to relu"),
    "nothing": (nn.Identity(), "part of the model's output|goes to no layer"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_reasons_before_a_layer(name):
    layer, words = BEFORE[name]
    size = 1 if name in ("padding of maps of one value", "transposed with gaps") else 6
    why = reason(ready(nn.Sequential(nn.BatchNorm2d(3), layer)), double(2, 3, size, size))
    assert any(word in why for word in words.split("|")), why


def test_an_input_that_is_written_over():
    net = ready(Net(_overwritten, head=nn.Conv2d(3, 3, 1)))
    assert "changed by add_" in reason(net, double(2, 3, 5, 5))


def test_weights_that_are_computed():
    for compute in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        model = ready(nn.Sequential(compute(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)))
        assert "its input comes from convolution" in reason(model, double(2, 3, 5, 5))
    model = ready(nn.Sequential(nk.ScaledStdConv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert "its input comes from convolution" in reason(model, double(2, 3, 5, 5), "1")


def test_weights_that_are_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.bn = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.bn(self.a(x))

    assert "shares its parameters with b" in reason(ready(Tied()), double(3, 4))


def test_a_layer_without_a_place_for_a_bias():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bn = nn.Parameter(torch.zeros(4, 6)), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.bn(x @ self.weight.t())

    model = ready(Bare())
    assert "no bias, and no place for one" in reason(model, double(3, 6))
    with torch.no_grad():
        model.bn.bias.copy_(
            nk.scale_shift(
                nk.Moments(model.bn.running_mean, model.bn.running_var, 0), model.bn.weight, None, model.bn.eps
            )[1].neg()
        )
    check(model, double(3, 6))


def test_a_class_that_ignores_its_bias():
    class Deaf(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight)

    assert "would move by" in reason(
        ready(nn.Sequential(Deaf(3, 4, 3, bias=False), nn.BatchNorm2d(4))), double(2, 3, 5, 5)
    )


def test_one_bad_fold_does_not_take_others_with_it():
    class Deaf(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight)

    layers = [layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())]
    layers[6] = Deaf(3, 3, 1, bias=False)
    result = check(ready(nn.Sequential(*layers)), double(2, 3, 4, 4), folded=3, skipped=1)
    assert result.skipped[0].layer == "7"


OTHERS = {
    "layer": (lambda: nn.LayerNorm(6), "LayerNorm"),
    "group": (lambda: nn.GroupNorm(2, 4), "GroupNorm"),
    "instance": (lambda: nn.InstanceNorm2d(4), "InstanceNorm2d"),
    "position": (lambda: nk.PositionBatchNorm2d(4, 6, 6), "for each channel"),
    "whitened": (lambda: nk.WhitenedBatchNorm2d(4), "WhitenedBatchNorm2d"),
    "domain": (lambda: nk.DomainBatchNorm2d(4, 2), "DomainBatchNorm2d"),
    "switchable": (lambda: nk.SwitchableNorm2d(4), "SwitchableNorm2d"),
    "response": (lambda: nk.FilterResponseNorm2d(4), "FilterResponseNorm2d"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms(name):
    build, words = OTHERS[name]
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), build()))
    with nk.domain(model, 1) if name == "domain" else nullcontext():
        assert words in reason(model, double(2, 3, 6, 6))


def test_statistics_that_are_not_finite():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model[1].running_var[1] = torch.nan
    (skipped,) = fold(model, double(2, 3, 5, 5)).skipped
    assert "not finite" in skipped.why


def test_weights_that_would_not_fit_in_their_type():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.float16)
    with torch.no_grad():
        model[1].weight.fill_(6e4)
        model[1].running_var.fill_(1e-4)
    (skipped,) = fold(model, double(2, 3, 5, 5).half()).skipped
    assert "finite" in skipped.why
