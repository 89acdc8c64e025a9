"""Parameters, counted; and the shapes of figure 5."""

import pytest
import torch

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab.models import bn_inception, dcgan, resnet, resnet18, sigmoid_mlp, small_inception, vgg
from normkit.lab.models.inception_rows import FIGURE_5, rows

BN = nk.BatchNorm2d


def count(model):
    return sum(p.numel() for p in model.parameters())


# with BN, and without: one bias for a gamma and a beta
@pytest.mark.parametrize(
    ("build", "normalized", "plain"),
    [
        (bn_inception, 11_188_288, 11_178_336),
        (small_inception, 89_674, 88_958),
        (lambda norm: small_inception(norm, width=64, modules=10), 10_171_402, 10_161_450),
        (lambda norm: resnet(20, norm), 269_722, 269_034),
        (lambda norm: resnet(56, norm, block="preact"), 853_018, 850_986),
        (lambda norm: resnet(110, norm, block="plain"), 1_727_962, 1_723_914),
        (resnet18, 11_689_512, 11_684_712),
        (vgg, 9_228_362, 9_225_610),
        (lambda norm: dcgan(norm)[0], 234_177, 234_081),
        (lambda norm: dcgan(norm)[1], 36_577, 36_513),
        (lambda norm: dcgan(norm, size=32)[0], 295_873, 295_649),
    ],
)
def test_parameters(build, normalized, plain):
    with torch.device("meta"):
        assert (count(build(BN)), count(build(None))) == (normalized, plain)


def test_parameters_of_the_sigmoid_net():
    assert count(sigmoid_mlp()) == 784 * 100 + 2 * 100 * 100 + 3 * 100 + 100 * 10 + 10 == 99_710
    assert count(sigmoid_mlp(nk.BatchNorm1d)) == 99_710 + 3 * 100


def test_the_papers_count_needs_more_than_figure_5():
    """The paper says 13.6 million. No reading of the table comes near; an auxiliary classifier would make it up."""
    with torch.device("meta"):
        model = bn_inception(BN)
    norms = sum(count(m) for m in model.modules() if isinstance(m, BN))
    classifier = count(model.classifier)
    assert (count(model) - norms - classifier, norms, classifier) == (10_143_384, 19_904, 1_025_000)
    auxiliary = 576 * 128 + 4 * 4 * 128 * 768 + 768 * 1000  # on 4a to 4d: 1x1, the 4x4 that pooling leaves, softmax
    assert count(model) < 11.3e6
    assert count(model) + auxiliary == pytest.approx(13.6e6, abs=0.05e6)


@torch.no_grad()
def test_maps_of_figure_5():
    model, seen = bn_inception(BN, classes=7).eval(), {}
    for name, block in [("stem", model.stem), *model.blocks.named_children()]:
        block.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: tuple(output.shape[1:])}))
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 7)
    assert seen == {
        "stem": (192, 28, 28),
        "3a": (256, 28, 28),
        "3b": (320, 28, 28),
        "3c": (576, 14, 14),
        **dict.fromkeys(["4a", "4b", "4c", "4d"], (576, 14, 14)),
        **dict.fromkeys(["4e", "5a", "5b"], (1024, 7, 7)),
    }


def test_rows_of_a_small_net():
    assert rows(10, 64) == FIGURE_5
    assert list(rows(2, 8)) == ["3a", "4a"]
    assert list(rows(6, 8)) == ["3a", "3b", "4a", "4b", "4c", "5a"]
    assert rows(6, 8)["3b"] == FIGURE_5["3c"].scaled(1 / 8)
    assert len(rows(150, 8)) == 150  # names do not collide


@pytest.mark.parametrize("modules", [2, 3, 4, 6, 9, 14])
def test_depth_can_be_chosen(modules):
    model = small_inception(BN, modules=modules, width=4)
    assert len(model.blocks) == modules
    assert sum(block.branches["3x3"][1].layer.stride == (2, 2) for block in model.blocks) == 2
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("depth", [20, 32, 44, 56, 110])
def test_layers_of_a_resnet(depth):
    with torch.device("meta"):
        model = resnet(depth, BN, width=2)
    weighted = [p for p in model.parameters() if p.dim() > 1]
    assert len(weighted) == depth
    assert len(model.branches()) == (depth - 2) // 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resnet(18, BN), "6n . 2.*got 18"),
        (lambda: resnet(20, BN, block="v2"), "v1, preact, plain; got 'v2'"),
        (lambda: vgg(BN, depth=12), "got 12"),
        (lambda: dcgan(BN, size=30), "got 30"),
        (lambda: small_inception(BN, modules=1), "got 1 and 8"),
        (lambda: small_inception(BN, activation="rellu"), "Did you mean"),
        (lambda: small_inception(lambda c: BN(c, activation="relu")), "without an activation"),
        (lambda: sigmoid_mlp(std=0.0), "more than 0; got 0.0"),
        (lambda: vgg(BN, init="xavier"), "he, glorot, gaussian; got 'xavier'"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
