"""Split batch normalization: every part of a batch by a norm of its own, evaluation by the first."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_
from support.twins import close, randn


class PlainSplit(nn.Module):
    """As the paper describes it, of torch's layers."""

    def __init__(self, layer):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=layer.momentum) for _ in range(layer.num_splits)).double()
        for norm, own in zip(self.norms, [layer, *layer.aux_bn], strict=True):
            state = own.state_dict()
            norm.load_state_dict({name: state[name] for name in norm.state_dict()})

    def forward(self, x):
        parts = x.chunk(len(self.norms)) if self.training else [x]
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=False)])


def assert_same_state(layer, plain):
    for norm, own in zip(plain.norms, [layer, *layer.aux_bn], strict=True):
        for name, t in norm.state_dict().items():
            close(own.state_dict()[name], t)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("num_splits", [2, 3])
def test_each_part_is_normalized_by_its_own_norm(num_splits, momentum):
    layer = randomize_(nk.SplitBatchNorm2d(4, momentum=momentum, num_splits=num_splits)).double()
    plain = PlainSplit(layer)
    for _ in range(3):
        x = (randn(12, 4, 3, 3) * 2 + 1).requires_grad_()
        twin, dy = x.detach().clone().requires_grad_(), randn(12, 4, 3, 3)
        y, expected = layer(x), plain(twin)
        y.backward(dy)
        expected.backward(dy)
        close(y, expected)
        close(x.grad, twin.grad)
    assert_same_state(layer, plain)
    for norm, own in zip(plain.norms, [layer, *layer.aux_bn], strict=True):
        close(own.weight.grad, norm.weight.grad)
        close(own.bias.grad, norm.bias.grad)


def test_evaluation_is_the_first_norms_alone():
    layer = randomize_(nk.SplitBatchNorm2d(4)).double().eval()
    plain, x = PlainSplit(layer).eval(), randn(5, 4, 3, 3)  # of any number of examples
    close(layer(x), plain(x))
    before = copy.deepcopy(layer.state_dict())
    for aux in layer.aux_bn:
        randomize_(aux)
    close(layer(x), plain(x))
    assert torch.equal(layer.running_mean, before["running_mean"])


def test_the_parts_of_residuals_and_masks_go_along():
    layer = randomize_(nk.SplitBatchNorm2d(4, num_splits=2, activation="relu")).double()
    alone = [copy.deepcopy(layer.aux_bn[0]) for _ in range(2)]
    alone[0].load_state_dict({name: layer.state_dict()[name] for name in alone[0].state_dict()})
    x, r, mask = randn(6, 4, 3, 3), randn(6, 4, 3, 3), torch.rand(6, 3, 3) > 0.3
    y = layer(x, residual=r, mask=mask)
    halves = zip(alone, x.chunk(2), r.chunk(2), mask.chunk(2), strict=True)
    expected = torch.cat([bn(part, residual=its, mask=kept) for bn, part, its, kept in halves])
    close(y, expected)
    assert (y >= 0).all()


@pytest.mark.parametrize("activation", ["relu", "hardswish", "module", None])
def test_another_activation_reaches_all_parts(activation):
    layer = randomize_(nk.SplitBatchNorm2d(4, activation="silu")).double()
    bare = copy.deepcopy(layer)
    bare.activation = None
    act = nn.PReLU(4).double() if activation == "module" else activation
    layer.activation = act
    x = randn(6, 4, 3, 3)
    functions = {"relu": nn.functional.relu, "hardswish": nn.functional.hardswish, "module": act, None: lambda y: y}
    close(layer(x), functions[activation](bare(x)))


def test_no_updates_reaches_the_auxiliary_norms():
    model = nn.Sequential(randomize_(nk.SplitBatchNorm2d(4)))
    before = copy.deepcopy(model.state_dict())
    with nk.no_updates(model):
        model(torch.randn(6, 4, 3, 3))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def refused(layer, error, message, x, **extras):
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=message):
        layer(x, **extras)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_a_batch_that_does_not_divide():
    layer = randomize_(nk.SplitBatchNorm2d(4, num_splits=3))
    message = r"SplitBatchNorm2d\(4\) needs a batch that 3 norms can share equally; got 8 examples.*drop_last"
    refused(layer, nk.ShapeError, message, torch.randn(8, 4, 3, 3))
    assert layer.eval()(torch.randn(8, 4, 3, 3)).shape == (8, 4, 3, 3)


def test_nothing_moves_if_a_later_part_is_refused():
    layer = randomize_(nk.SplitBatchNorm2d(4, nonfinite="raise"))
    x = torch.randn(6, 4, 3, 3)
    x[5, 2] = torch.inf
    refused(layer, nk.NonFiniteError, r"NaN or infinite in channels \[2\]", x)
    mask = torch.ones(6, 3, 3, dtype=torch.bool)
    mask[3:] = False
    refused(layer, nk.ShapeError, "more than 1 value per channel", torch.randn(6, 4, 3, 3), mask=mask)
    refused(layer, nk.ShapeError, "more than 1 value per channel", torch.randn(2, 4, 1, 1))


def test_a_part_that_is_not_finite_is_skipped_alone():
    layer = randomize_(nk.SplitBatchNorm2d(4, nonfinite="skip-update"))
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(6, 4, 3, 3)
    x[5] = torch.nan
    layer(x)
    moved = {name for name, t in layer.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("num_splits", [1, 0, -2, 2.0, True, "two"])
def test_a_number_of_parts_that_is_none(num_splits):
    with pytest.raises(nk.ArgumentError, match=f"num_splits must be a number of parts, 2 or more; got {num_splits!r}"):
        nk.SplitBatchNorm2d(4, num_splits=num_splits)
