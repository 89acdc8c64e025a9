import pytest
import torch
from torch import nn

from normkit import layers
from normkit.bench import Effort, check_installed, choose
from normkit.bench.families.networks import NETWORKS
from normkit.bench.network_case import Network, NetworkCase, settle_
from normkit.errors import MissingExtraError

TINY = Effort(rounds=2, model_rounds=2, compiles=False)


def small_net(size):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (size - 2) ** 2, 10)
    )


def without_norms(size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size**2, 10))


def case(build=small_net, mode="training", batch=2, norms="batch"):
    return NetworkCase("networks", Network("small", "torch", build, norms), 8, batch, mode)


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_network_is_timed_as_it_is_and_converted(mode):
    result = case(mode=mode).measure(TINY)
    assert result.errors == {}
    assert result.seconds.keys() == {"ours", "eager"}
    assert result.ratios.keys() == {"eager"}
    assert (result.rounds, result.facts["mode"], result.facts["converted"]) == (2, mode, 1)


def test_a_network_without_such_norms_is_not_compared_with_itself():
    result = case(without_norms).measure(TINY)
    assert "NothingConvertedError: small has no norm that convert makes 'batch'" in result.errors["ours"]
    assert result.ratios == {}


def test_the_converted_network_computes_the_same(monkeypatch):
    models = []

    def keep(self, build):
        torch.manual_seed(0)
        models.append(build().eval())
        return lambda: None

    monkeypatch.setattr(NetworkCase, "_step", keep)
    case(mode="evaluation").measure(TINY)
    ours, eager = models
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(ours(x), eager(x))
    assert [type(m) for m in ours.modules() if "BatchNorm" in type(m).__name__] == [layers.BatchNorm2d]
    assert [type(m) for m in eager.modules() if "BatchNorm" in type(m).__name__] == [nn.BatchNorm2d]


def test_networks_are_settled_on_images_before_they_are_evaluated():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3))
    images = 5 + 3 * torch.randn(1, 3, 6, 6)
    settle_(model, images)
    expected = model[0](images).detach()
    torch.testing.assert_close(model[1].running_mean, expected.mean((0, 2, 3)))
    assert model[1].momentum == 0.3


def test_the_networks_have_what_was_asked_for():
    cases = choose(families=["networks"])
    assert len(NETWORKS) >= 12
    assert len(cases) == len(NETWORKS) * 2 * 3 * 2  # two sizes, three batches, training and evaluation
    assert {(c.size, c.batch, c.mode) for c in cases if c.quick} == {(64, 16, "training"), (64, 16, "evaluation")}
    assert {network.norms for network in NETWORKS} == {"batch", "layer"}


def test_a_missing_package_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("normkit.bench.network_case.find_spec", lambda name: None if name == "pytorchcv" else object())
    with pytest.raises(
        MissingExtraError, match=r"needs pytorchcv and transformers, .*; pytorchcv cannot be imported\. Install"
    ):
        check_installed(choose(families=["networks"]))
    check_installed(choose(families=["batch"]))


@pytest.mark.parametrize(
    "network",
    [pytest.param(n, marks=[] if n.name == "resnet18" else pytest.mark.deep) for n in NETWORKS],
    ids=lambda network: network.name,
)
def test_every_network_takes_one_small_image_and_is_converted(network):
    pytest.importorskip(network.package)
    smallest = NetworkCase("networks", network, 64, 1, "training")
    result = smallest.measure(TINY)
    assert result.errors == {}
    assert result.facts["converted"] > 10
