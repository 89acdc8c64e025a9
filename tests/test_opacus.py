"""normkit.opacus and Opacus itself: what is refused, what takes its place, and the gradients of single examples."""

import importlib
import sys

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError, MissingExtraError
from normkit.layers.norm_layer import NormLayer
from support import aside  # noqa: F401  # where Opacus is
from support.cases import CASES, randomize_
from support.depth import thinned

pytest.importorskip("opacus")
importlib.import_module("normkit.opacus")
errors = importlib.import_module("opacus.validators.errors")
GradSampleModule = importlib.import_module("opacus.grad_sample").GradSampleModule
Validator = importlib.import_module("opacus.validators").ModuleValidator

pytestmark = pytest.mark.deep  # see tests/conftest.py

REFUSED = {
    "AccumulatedBatchNorm1d",
    "AccumulatedBatchNorm2d",
    "AccumulatedBatchNorm3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "DomainBatchNorm1d",
    "DomainBatchNorm2d",
    "DomainBatchNorm3d",
    "EvoNormB0",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "MovingBatchNorm2d",
    "PositionBatchNorm2d",
    "ShuffledBatchNorm1d",
    "ShuffledBatchNorm2d",
    "SplitBatchNorm2d",
    "SwitchableNorm2d",
    "SyncBatchNorm",
    "WhitenedBatchNorm1d",
    "WhitenedBatchNorm2d",
}


def layers():
    """By name, a row of each layer with something to train, if it has one: nothing else is any concern of Opacus'."""
    ours = [case for case in CASES if isinstance(case.build(), NormLayer)]
    trained = [case for case in ours if next(case.build().parameters(), None) is not None]
    return {case.name: case for case in ours} | {case.name: case for case in trained}


LAYERS = layers()


def net(norm):
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.Flatten(), nn.Linear(16 * 4 * 4, 5))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_its_verdict(name):
    layer = LAYERS[name].layer()
    found = Validator.validate(nn.Sequential(nn.Linear(1, 1), layer))
    tracked = [error for error in found if "track_running_stats" in str(error)]  # rows of InstanceNorm that store
    assert bool(found) == (name in REFUSED or bool(tracked))
    for error in found:
        assert isinstance(error, errors.UnsupportedModuleError)
        assert any(type(part).__name__ in str(error) for part in layer.modules())  # or its auxiliary norms


def test_our_batch_norm_is_not_valid_for_private_training():
    """Opacus looked up exact types, and called it valid."""
    model = net(nk.BatchNorm2d(16))
    assert not Validator.is_valid(model)
    with pytest.raises(errors.UnsupportedModuleError, match=r"BatchNorm2d normalizes an example .* nk\.convert"):
        Validator.validate(model, strict=True)
    assert Validator.is_valid(net(nk.FrozenBatchNorm2d(16)))
    assert Validator.is_valid(nk.convert(model, "group").model)
    assert Validator.is_valid(nk.freeze(model).model.train())


@pytest.mark.parametrize("kind", [nk.BatchNorm2d, nk.GhostBatchNorm2d, nk.BatchRenorm2d])
def test_the_fixer_keeps_all_but_the_statistics(kind):
    model = randomize_(net(kind(16, eps=1e-3, activation="silu")))
    fixed = Validator.fix(model)
    norm = fixed[1]
    assert type(norm) is nk.GroupNorm
    assert (norm.num_channels, norm.eps, norm.activation) == (16, 1e-3, "silu")
    assert torch.equal(norm.weight, model[1].weight)
    assert torch.equal(norm.bias, model[1].bias)
    assert type(model[1]) is kind  # the model itself is left as it is
    assert Validator.is_valid(fixed)


def test_the_fixers_options():
    model = net(nk.BatchNorm2d(16))
    assert Validator.fix(model, num_groups=4)[1].num_groups == 4
    assert type(Validator.fix(model, replace_bn_with_in=True)[1]) is nk.InstanceNorm2d
    behind_linear = nn.Sequential(nn.Linear(5, 32), nk.BatchNorm1d(32))
    assert Validator.fix(behind_linear)[1].num_groups < 32  # a group of one value would be zero
    with pytest.raises(ArgumentError, match="num_groups=4"):
        Validator.fix(model, num_groups=4, replace_bn_with_in=True)
    with pytest.raises(errors.UnsupportableModuleError, match=r"BatchNorm1d cannot be replaced: .*\(N, C\)"):
        Validator.fix(behind_linear, replace_bn_with_in=True)
    with pytest.raises(errors.UnsupportableModuleError, match="EvoNormB0 cannot be replaced"):
        Validator.fix(net(nk.EvoNormB0(16)))


def test_an_instance_norm_stores_nothing_of_its_examples():
    model = randomize_(net(nk.InstanceNorm2d(16, affine=True, track_running_stats=True, activation="relu")))
    with pytest.raises(errors.UnsupportedModuleError, match="InstanceNorm2d with track_running_stats=True"):
        Validator.validate(model, strict=True)
    fixed = Validator.fix(model, num_groups=4)  # which is an option for others
    assert Validator.is_valid(fixed)
    assert not list(fixed[1].buffers())
    assert fixed[1].activation == "relu"
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(fixed(x), model(x))  # in training both use the examples' own
    assert list(model[1].buffers())


def by_loop(layer, x, gradient):
    """The gradients of each example, by running it alone."""
    found = {name: [] for name, _ in layer.named_parameters()}
    for one, backprop in zip(x.split(1), gradient.split(1), strict=True):
        layer.zero_grad()
        (layer(one) * backprop).sum().backward()
        for name, parameter in layer.named_parameters():
            found[name].append(parameter.grad.clone())
    return {name: torch.stack(values) for name, values in found.items()}


def assert_samples(layer, x, **options):
    """The gradients by Opacus are those by a loop. In double: sums in another order differ in their last digits."""
    gradient = torch.randn_like(layer(x).detach())
    expected = by_loop(layer, x, gradient)
    model = GradSampleModule(layer, loss_reduction="sum", **options)
    (model(x.clone().requires_grad_()) * gradient).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, expected[name], rtol=1e-10, atol=1e-10, msg=name)
    model.to_standard_module()


WITHIN = {
    "group": (lambda **a: nk.GroupNorm(3, 6, eps=0.1, **a), (4, 6, 5, 3)),
    "group of (N, C)": (lambda **a: nk.GroupNorm(2, 6, **a), (4, 6)),
    "instance": (lambda **a: nk.InstanceNorm2d(6, eps=0.2, affine=True, **a), (4, 6, 5, 3)),
    "layer": (lambda **a: nk.LayerNorm(6, eps=0.1, **a), (4, 5, 6)),
    "layer over two": (lambda **a: nk.LayerNorm((5, 6), **a), (4, 2, 5, 6)),
    "layer of (N, C)": (lambda **a: nk.LayerNorm(6, bias=False, **a), (4, 6)),
    "rms": (lambda **a: nk.RMSNorm(6, eps=0.1, **a), (4, 5, 6)),
    "rms, default eps": (lambda **a: nk.RMSNorm(6, **a), (4, 6)),
}
ACTIVATIONS = {
    "none": lambda: None,
    "silu": lambda: "silu",
    "leaky_relu": lambda: "leaky_relu",
    "hardswish": lambda: "hardswish",
    "in place": lambda: nn.ReLU(inplace=True),
    "with parameters": lambda: nn.PReLU(init=0.3),
    "function": lambda: torch.sin,
}


@pytest.mark.parametrize("activation", thinned(ACTIVATIONS, lambda name: name != "with parameters"))
@pytest.mark.parametrize("name", WITHIN)
def test_registered_gradients(name, activation):
    build, shape = WITHIN[name]
    layer = randomize_(build(activation=ACTIVATIONS[activation]())).double()
    assert_samples(layer, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("part", ["scale", "shift"])
def test_gradients_of_gamma_or_beta_alone(part):
    assert_samples(randomize_(nk.GroupNorm(2, 6, affine=part)).double(), torch.randn(4, 6, 3, dtype=torch.float64))


@pytest.mark.deep
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in REFUSED and not list(case.build().buffers())], ids=str
)
def test_gradients_of_every_layer(case):
    """Those without a sampler of their own are run by Opacus' functorch."""
    layer, x = case.layer(torch.float64), case.input(torch.float64)
    if any(parameter.requires_grad for parameter in layer.parameters()):
        assert_samples(layer, x)
        assert_samples(layer, x, force_functorch=True)


@pytest.mark.parametrize("given", [{"residual": torch.randn(4, 6, 5)}, {"mask": torch.ones(4, 5, dtype=torch.bool)}])
def test_what_opacus_does_not_see_is_refused(given):
    """It keeps the positional inputs of a layer: with a residual before an activation its gradients would be others."""
    layer, x = randomize_(nk.GroupNorm(2, 6, activation="relu")), torch.randn(4, 6, 5)
    expected = layer(x, **given)
    model = GradSampleModule(layer)
    with pytest.raises(ArgumentError, match=f"Opacus does not see {next(iter(given))}= in a call of GroupNorm"):
        layer(x, **given)
    model(x.requires_grad_()).mean().backward()
    model.to_standard_module()
    assert torch.equal(layer(x, **given), expected)  # the guard goes with Opacus' own hooks


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_private_training_steps():
    """From the engine down: a converted model learns, and its norms with it."""
    engine = importlib.import_module("opacus").PrivacyEngine()
    model = nk.convert(net(nk.BatchNorm2d(16, activation="relu")), "group").model
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 6, 6), torch.randint(0, 5, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    before = model[1].weight.detach().clone()
    for x, target in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), target).backward()
        optimizer.step()
    assert not torch.equal(model[1].weight, before)
    mixing = net(nk.GhostBatchNorm2d(16))
    with pytest.raises(errors.UnsupportedModuleError, match="GhostBatchNorm2d"):
        engine.make_private(
            module=mixing,
            optimizer=torch.optim.SGD(mixing.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_without_opacus_the_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "normkit.opacus")
    monkeypatch.setitem(sys.modules, "opacus.validators", None)
    with pytest.raises(MissingExtraError, match=r"normkit\.opacus needs opacus.*normkit\[opacus\]"):
        importlib.import_module("normkit.opacus")
