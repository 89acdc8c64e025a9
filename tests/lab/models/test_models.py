"""What holds of every model, whatever its norm."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.lab.models import MODELS
from support.depth import thinned
from support.model_cases import CASES, IDS, LARGE, PAIRS, build, randomize_


def test_every_model_has_a_case():
    assert {name for name in MODELS if any(str(case).startswith(name) for case in CASES)} == set(MODELS)


@pytest.mark.parametrize(("case", "norm"), PAIRS, ids=IDS)
def test_it_learns_and_evaluates(case, norm):
    model, x = randomize_(build(case, norm)), case.input()
    y = model(x)
    assert y.shape == (3, *case.outputs)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, g in gradients.items() if g is None or not g.isfinite().all()] == []
    assert any(g.abs().max() > 0 for g in gradients.values())
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-4)  # no batch-mates in evaluation


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_moves_statistics_and_evaluation_does_not(case):
    model, x = build(case), case.input()
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert before
    with torch.no_grad():
        model.eval()(x)
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
        model.train()(x)
    assert not any(torch.equal(b, before[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("case", [case for case in CASES if str(case) != LARGE], ids=str)
def test_fused_and_separate_activations_agree(case):
    ours, theirs = build(case, "batch").double(), build(case, "torch batch").double()
    ours.load_state_dict(randomize_(theirs).state_dict())
    x = case.input().double()
    for y, expected in ((ours(x), theirs(x)), (ours.eval()(x), theirs.eval()(x))):
        torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", [case for case in CASES if str(case) != LARGE], ids=str)
def test_no_bias_is_redundant(case):
    """A norm takes a bias before it away, and its gradient with it."""
    model = randomize_(build(case)).double()
    output = model(case.input(8).double())
    (output * torch.randn_like(output)).sum().backward()
    layers = {name: m for name, m in model.named_modules() if getattr(m, "bias", None) is not None}
    assert [name for name, m in layers.items() if m.bias.grad.norm() < 1e-9] == []
    weighted = [name for name, m in layers.items() if not isinstance(m, _BatchNorm)]
    assert len(weighted) == (2 if "discriminator" in str(case) else 1)  # the ends alone


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_norm_every_layer_has_a_bias(case):
    model = build(case, "none")
    without = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear) and m.bias is None]
    assert all(m.groups > 1 for m in without)  # the depthwise half of a separable convolution
    assert len(without) == (str(case) == LARGE)
    assert not list(model.buffers())


@pytest.mark.parametrize("case", [case for case in CASES if len(case.shape) == 3], ids=str)
def test_channels_last(case):
    model, x = randomize_(build(case)).eval(), case.input()
    with torch.no_grad():
        expected = model(x)
        y = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_are_independent(case):
    model, x = randomize_(build(case)).eval(), case.input()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(x)
        for p in model.parameters():
            p.zero_()
        assert torch.equal(twin(x), expected)


EXPORTED = ("sigmoid-mlp", "small-inception", "resnet v1", "resnet preact", "vgg", "dcgan generator")


@pytest.mark.parametrize(
    "case",
    thinned([case for case in CASES if str(case) in EXPORTED], lambda case: str(case) == "small-inception"),
    ids=str,
)
def test_torch_export(case):
    model, x = randomize_(build(case)).eval(), case.input()
    program = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)
