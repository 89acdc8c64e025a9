"""Micro-batches that share the statistics of one large batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.case import randomize_
from support.twins import close, randn, same_state, twins


def test_micro_batches_equal_the_large_batchs_statistics():
    layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=3)
    for _ in range(2):
        large = randn(7, 4, 3, 3) * 2 + 4
        micro = large.split([2, 1, 4])
        before = copy.deepcopy(layer.state_dict())
        for part in micro[:2]:
            layer(part)
            assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        last = layer(micro[2])
        # The last of a cycle is normalized with the statistics of the whole large batch.
        close(last, bn(large)[3:])
        same_state(layer, bn)


@pytest.mark.parametrize(
    ("ours", "torchs", "shape"),
    [
        (nk.AccumulatedBatchNorm1d, nn.BatchNorm1d, (9, 4)),
        (nk.AccumulatedBatchNorm1d, nn.BatchNorm1d, (7, 4, 3)),
        (nk.AccumulatedBatchNorm3d, nn.BatchNorm3d, (7, 4, 3, 2, 2)),
    ],
)
def test_other_ranks(ours, torchs, shape):
    layer = randomize_(ours(4, micro_batches=2)).double()
    bn = torchs(4).double()
    bn.load_state_dict(layer.state_dict())
    for _ in range(2):
        large = randn(*shape) * 2 + 4
        layer(large[:3])
        close(layer(large[3:]), bn(large)[3:])
        same_state(layer, bn)
    close(layer.eval()(large), bn.eval()(large))


def test_every_micro_batch_sees_a_batchs_worth_of_values():
    layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=3)
    parts = [randn(2, 4, 3, 3) + i for i in range(6)]
    for i, part in enumerate(parts):
        window = torch.cat(parts[max(0, i - 2) : i + 1])
        close(layer(part), copy.deepcopy(bn)(window)[-2:])


def test_gradients_flow_through_the_micro_batchs_own_share():
    layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
    first, x, dy = randn(2, 4, 3, 3), randn(3, 4, 3, 3).requires_grad_(), randn(3, 4, 3, 3)
    layer(first)
    (found,) = torch.autograd.grad(layer(x), x, dy)
    both = torch.cat([first, x])
    mean, var = both.mean((0, 2, 3), keepdim=True), both.var((0, 2, 3), keepdim=True, unbiased=False)
    y = (x - mean) / (var + layer.eps).sqrt() * layer.weight[:, None, None] + layer.bias[:, None, None]
    (expected,) = torch.autograd.grad(y, x, dy)
    close(found, expected)


def test_checkpointed_micro_batches():
    layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
    plain = copy.deepcopy(layer)
    for _ in range(3):
        x, dy = randn(2, 4, 3, 3).requires_grad_(), randn(2, 4, 3, 3)
        twin = x.detach().clone().requires_grad_()
        checkpoint(layer, x, use_reentrant=False).backward(dy)
        plain(twin).backward(dy)
        close(x.grad, twin.grad)
    same_state(layer, plain, 0)


def test_a_bad_micro_batch_is_left_out_of_the_window():
    layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2, nonfinite="skip-update")
    layer(torch.full((2, 4, 3, 3), torch.nan, dtype=torch.float64))
    assert layer(randn(2, 4, 3, 3)).isfinite().all()
    assert layer.running_mean.isfinite().all()


@pytest.mark.parametrize("begin", ["load", "reset"])
def test_a_reloaded_or_reset_layer_begins_a_new_window(begin):
    layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
    for name, b in layer.named_buffers():
        if name not in layer.state_dict():
            b.fill_(7)  # what to_empty may find in memory
    if begin == "load":
        layer.load_state_dict(bn.state_dict())
    else:
        layer.reset_parameters()
        bn.reset_parameters()
    x = randn(3, 4, 3, 3)
    close(layer(x), bn(x))
    assert layer.micro_step == 1


def test_half_precision_keeps_its_window_in_float32():
    layer = nk.AccumulatedBatchNorm2d(4, micro_batches=2).half()
    assert layer.window_mean.dtype == torch.float32
    assert layer.running_mean.dtype == torch.float16


def test_what_it_refuses():
    with pytest.raises(nk.ArgumentError, match="micro_batches must be at least 1"):
        nk.AccumulatedBatchNorm2d(4, micro_batches=0)
