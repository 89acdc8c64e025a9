"""The unit, the initializations, and what single models promise."""

from math import sqrt

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.models import Finish, bn_inception, dcgan, initialize_, resnet, sigmoid_mlp, small_inception, unit, vgg
from normkit.lab.models.units import Join, PointwiseConv2d


def names(norm, activation="relu"):
    return [name for name, _ in unit(nn.Conv2d(4, 4, 1), 4, Finish(norm, activation)).named_children()]


def test_a_unit_has_what_it_needs():
    assert names(None) == ["layer", "activation"]
    assert names(None, None) == ["layer"]
    assert names(nk.BatchNorm2d, None) == ["layer", "norm"]
    assert names(nk.BatchNorm2d) == ["layer", "norm"]  # inside the norm
    assert names(lambda c: nk.GroupNorm(2, c), "leaky_relu") == ["layer", "norm"]
    assert names(nk.BatchNorm2d, "sigmoid") == ["layer", "norm", "activation"]  # the native loops have no sigmoid
    assert names(nn.BatchNorm2d) == ["layer", "norm", "activation"]
    assert names(lambda c: nn.Sequential(nk.BatchNorm2d(c))) == ["layer", "norm", "activation"]
    assert names(lambda c: nk.BatchNorm2d(c, inplace=True)) == ["layer", "norm", "activation"]
    assert names(lambda c: nk.FilterResponseNorm2d(c, threshold=False)) == ["layer", "norm", "activation"]


@pytest.mark.parametrize("norm", [nk.EvoNormB0, lambda c: nk.EvoNormS0(c, groups=2), nk.FilterResponseNorm2d])
def test_a_norm_that_is_an_activation_gets_no_second(norm):
    assert names(norm) == ["layer", "norm"]


@pytest.mark.parametrize("norm", [nk.BatchNorm2d, nn.BatchNorm2d, nk.FilterResponseNorm2d, None])
@pytest.mark.parametrize("activation", ["relu", "sigmoid", None])
def test_join(norm, activation):
    join = Join(4, Finish(norm, activation)).eval()
    x, shortcut = torch.randn(2, 2, 4, 3, 3)
    plain = join.norm(x) if norm is None else norm(4).eval()(x)
    after = {"relu": torch.relu, "sigmoid": torch.sigmoid, None: lambda z: z}[activation]
    torch.testing.assert_close(join(x, shortcut), after(plain + shortcut))


@pytest.mark.parametrize("norm", [nk.BatchNorm1d, nn.BatchNorm1d, nk.LayerNorm, None])
def test_the_last_sigmoids_input_can_be_read(norm):
    model, seen = sigmoid_mlp(norm), []
    assert model.hidden[-1].activation is model.get_submodule("hidden.2.activation")
    model.hidden[-1].activation.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.rand(60, 1, 28, 28).round()
    y = model(x)
    torch.testing.assert_close(y, model.output(seen[0].sigmoid()))
    expected = model.hidden[-1].layer(model.hidden[:-1](x.flatten(1)))
    if isinstance(norm, type) and issubclass(norm, nn.BatchNorm1d):
        expected = (expected - expected.mean(0)) / (expected.var(0, unbiased=False) + 1e-5).sqrt()
        torch.testing.assert_close(seen[0], expected, rtol=1e-3, atol=1e-4)
    elif norm is None:
        torch.testing.assert_close(seen[0], expected)


def test_every_sigmoid_of_inception_is_a_module():
    for norm in (nk.BatchNorm2d, None):
        model = small_inception(norm, activation="sigmoid")
        convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
        assert sum(isinstance(m, nn.Sigmoid) for m in model.modules()) == convolutions


def test_average_pooling_does_not_count_the_border():
    pool = small_inception(None).blocks[0].branches["pool"][0]
    assert isinstance(pool, nn.AvgPool2d)
    assert torch.equal(pool(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


def std(layer):
    return layer.weight.std().item()


@pytest.mark.parametrize(
    ("init", "expected"),
    [("he", sqrt(2 / (64 * 9))), ("glorot", sqrt(2 / (64 * 9 + 128 * 9))), ("gaussian", 1.0)],
)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_initial_weights(kind, init, expected):
    layer = kind(64, 128, 3)
    initialize_(layer, init, 0.5)
    assert std(layer) == pytest.approx(0.5 * expected, rel=0.03)
    assert not layer.bias.any()


def test_fans_of_groups():
    layer = nn.Conv2d(32, 256, 7, groups=32)
    initialize_(layer, "he")
    assert std(layer) == pytest.approx(sqrt(2 / 49), rel=0.05)


def test_models_pass_their_initialization_on():
    assert std(sigmoid_mlp(std=0.3).hidden[0].layer) == pytest.approx(0.3, rel=0.05)
    assert std(dcgan(None)[0][1].layer) == pytest.approx(0.02, rel=0.05)
    for build in (small_inception, vgg, bn_inception, lambda n, **o: resnet(8, n, **o)):
        torch.manual_seed(0)
        once = list(build(None, init="glorot").parameters())
        torch.manual_seed(0)
        twice = list(build(None, init="glorot", scale=2.0).parameters())
        assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_he_keeps_a_plain_nets_signal():
    model, x = vgg(None, depth=16, width=16, init="he"), torch.randn(8, 3, 32, 32)
    assert 0.1 < model(x).std() < 10
    assert vgg(None, depth=16, width=16, init="he", scale=0.3)(x).std() < 1e-3


def test_googlenets_regularizers():
    model = bn_inception(None, classes=10, dropout=0.4, lrn=True)
    assert [name for name, m in model.named_modules() if isinstance(m, nk.LocalResponseNorm)] == [
        "stem.lrn1",
        "stem.lrn2",
    ]
    assert model.dropout.p == 0.4
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
        assert torch.equal(model.eval()(x), model(x))


def test_what_a_dcgan_does_not_normalize():
    generator, discriminator = dcgan(nk.BatchNorm2d, size=32)
    assert not hasattr(generator[-1], "norm")
    assert not hasattr(discriminator[0], "norm")
    assert all(hasattr(u, "norm") for u in [*generator[1:-1], *discriminator[1:-2]])
    assert discriminator[0].activation.negative_slope == 0.2
    images = generator(torch.randn(4, 64))
    assert images.abs().max() <= 1
    assert discriminator(images).shape == (4,)


def test_branches_are_what_fixup_and_skip_init_want():
    model, x = resnet(14, None), torch.randn(2, 3, 32, 32)
    nk.fixup_init_(model.branches(), classifier=model.classifier)
    assert not model(x).any()
    for branch in model.branches():
        branch.append(nk.SkipInit())
    assert len([m for m in model.modules() if isinstance(m, nk.SkipInit)]) == 6


def test_preact_leaves_the_shortcut_free():
    model, x = resnet(8, nk.BatchNorm2d, block="preact"), torch.randn(2, 3, 32, 32)
    nn.init.zeros_(model.branches()[0][-1].weight)
    stem = model.stem(x)
    assert torch.equal(model.stages[0](stem), stem)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_pointwise_convolution_is_torchs(bias, layout):
    torch.manual_seed(5)
    ours, theirs = PointwiseConv2d(6, 4, 1, bias=bias).double(), nn.Conv2d(6, 4, 1, bias=bias).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 6, 5, 7, dtype=torch.float64).contiguous(memory_format=layout)
    both = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    y, expected = ours(both[0]), theirs(both[1])
    assert y.is_contiguous(memory_format=layout)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(both[0].grad, both[1].grad, rtol=1e-12, atol=1e-12)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_with_a_seed_weights_do_not_depend_on_what_was_drawn_before():
    nets = [sigmoid_mlp(norm, inputs=9, std=None) for norm in (None, nk.BatchNorm1d)]
    for net in nets:
        torch.randn(3)
        initialize_(net, "gaussian", 0.1, seed=5)
    weights = [[module.weight for module in net.modules() if isinstance(module, nn.Linear)] for net in nets]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_without_an_initialization_nothing_is_drawn_but_by_torch():
    torch.manual_seed(0)
    expected = nn.Conv2d(3, 4, 3, padding=1, bias=False).weight
    torch.manual_seed(0)
    net = resnet(8, nk.BatchNorm2d, width=4, init=None)
    assert torch.equal(net.stem.layer.weight, expected)
