"""Fixup and SkipInit: how residual nets without normalization start."""

import copy
import math

import pytest
import torch
from torch import nn

import normkit as nk


def block_branch(channels, layers=2):
    convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(*[m for conv in convs for m in (conv, nn.ReLU())][:-1])


def test_skip_init_starts_as_the_identity_and_learns():
    x = torch.randn(2, 4, 5, 5)
    branch, skip = block_branch(4), nk.SkipInit()
    y = x + skip(branch(x))
    assert torch.equal(y, x)
    assert skip.state_dict() == {"alpha": torch.zeros(1)}
    y.square().sum().backward()
    assert skip.alpha.grad.abs() > 0
    assert branch[0].weight.grad.abs().max() == 0  # until alpha has moved
    with pytest.raises(nk.DtypeError, match=r"SkipInit needs a floating point input; got torch.int64"):
        skip(torch.ones(3).long())


def test_fixup_starts_with_silent_branches_and_classifier():
    branches, classifier = nn.ModuleList(block_branch(4) for _ in range(5)), nn.Linear(4, 3)
    assert nk.fixup_init_(branches, classifier=classifier) is None
    h = x = torch.randn(2, 4, 5, 5)
    for branch in branches:
        assert torch.equal(branch(h), torch.zeros_like(h))
        h = h + branch(h)
    assert torch.equal(h, x)
    assert torch.equal(classifier(h.mean((2, 3))), torch.zeros(2, 3))
    assert all(torch.equal(m.bias, torch.zeros_like(m.bias)) for m in branches.modules() if isinstance(m, nn.Conv2d))


LAYER_FANS = {
    "conv": (lambda: nn.Conv2d(64, 48, 3), 48 * 9),
    "grouped": (lambda: nn.Conv2d(128, 64, 3, groups=4), 16 * 9),
    "transposed": (lambda: nn.ConvTranspose2d(48, 64, 3), 64 * 9),
    "linear": (lambda: nn.Linear(200, 150), 150),
    "conv1d": (lambda: nn.Conv1d(64, 80, 5), 80 * 5),
}


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("name", LAYER_FANS)
def test_fixup_scales_by_the_formula(name, m):
    build, fan_out = LAYER_FANS[name]
    branches = [nn.Sequential(*(build() for _ in range(m))) for _ in range(9)]
    nk.fixup_init_(iter(branches))
    drawn = torch.cat([layer.weight.flatten() for branch in branches for layer in branch[:-1]]).double()
    expected = math.sqrt(2 / fan_out) * 9 ** (-1 / (2 * m - 2))
    # The deviation of n normal values is itself known to 1/sqrt(2n); five times that is no accident.
    assert drawn.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(drawn)))
    assert drawn.mean().abs() < 5 * expected / math.sqrt(len(drawn))
    assert all(not branch[-1].weight.any() for branch in branches)


def test_fixup_counts_each_branch_on_its_own():
    single, double = nn.Linear(300, 300), nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300, bias=False))
    nk.fixup_init_([single, double])
    assert not single.weight.any()
    assert double[0].weight.std().item() == pytest.approx(math.sqrt(2 / 300) * 2**-0.5, rel=0.02)


def test_fixup_refuses_and_leaves_all_as_it_was():
    good = block_branch(4)
    before = copy.deepcopy(good.state_dict())
    for words, branches, options in (
        ("at least one residual branch; got none", [], {}),
        ("list of branches; got one Sequential", good, {}),
        ("branch 1 is a str", [good, "conv"], {}),
        ("branch 1, a ReLU, has none", [good, nn.ReLU()], {}),
        ("branch 1, 1: BatchNorm2d. Remove", [good, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))], {}),
        ("found branch 1, 0: BatchNorm2d", [good, nn.Sequential(nk.BatchNorm2d(4))], {}),
        ("found branch 1, 0: LayerNorm", [good, nn.Sequential(nn.LayerNorm(4))], {}),
        ("found branch 1, itself: ScaledStdConv2d", [good, nk.ScaledStdConv2d(4, 4, 3)], {}),
        ("branch 1 has one of an earlier", [good, good], {}),
        ("branch 1, itself: ParametrizedLinear are param", [good, nk.weight_norm(nn.Linear(4, 4))], {}),
        ("branch 1, itself: LazyLinear is lazy", [good, nn.LazyLinear(4)], {}),
        ("as classifier; got Sequential", [good], {"classifier": nn.Sequential(nn.Linear(4, 2))}),
    ):
        with pytest.raises(nk.ArgumentError, match=words):
            nk.fixup_init_(branches, **options)
        assert all(torch.equal(good.state_dict()[name], t) for name, t in before.items())
