"""Batch renormalization: its ties to BatchNorm, its limits and its schedule."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.kernels import core, select
from support.case import randomize_
from support.twins import close, randn, twins


def test_unclipped_training_equals_inference():
    layer, _ = twins(nk.BatchRenorm2d, r_max=1e6, d_max=1e6)
    x = randn(6, 4, 3, 3) * 3 + 2
    expected = copy.deepcopy(layer).eval()(x)
    close(layer(x), expected)


def test_limits_of_one_and_zero_make_it_batch_norm():
    layer, bn = twins(nk.BatchRenorm2d, r_max=1.0, d_max=0.0)
    x = randn(6, 4, 3, 3)
    close(layer(x), bn(x))


def test_the_gradient_is_batch_norms_with_gamma_times_r():
    layer, bn = twins(nk.BatchRenorm2d)
    x, dy = randn(6, 4, 3, 3).requires_grad_(), randn(6, 4, 3, 3)
    std = (x.detach().var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
    r = (std / (layer.running_var + layer.eps).sqrt()).clamp(1 / 3, 3)
    with torch.no_grad():
        bn.weight.mul_(r)
    (found,) = torch.autograd.grad(layer(x), x, dy)
    (expected,) = torch.autograd.grad(bn(x), x, dy)
    close(found, expected)


def test_the_standard_deviation_is_what_is_averaged():
    layer, _ = twins(nk.BatchRenorm2d, momentum=0.25)
    x = randn(6, 4, 3, 3) * 2 + 1
    old_mean, old_std = layer.running_mean.clone(), (layer.running_var + layer.eps).sqrt()
    layer(x)
    std = (x.var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
    close(layer.running_mean, 0.75 * old_mean + 0.25 * x.mean((0, 2, 3)))
    close((layer.running_var + layer.eps).sqrt(), 0.75 * old_std + 0.25 * std)


@pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))
@pytest.mark.parametrize("affine", [True, "scale", "shift", False])
@pytest.mark.parametrize(
    "extras", [{}, {"residual": (6, 4, 3, 5)}, {"mask": (6, 3, 5)}], ids=["alone", "residual", "mask"]
)
@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_step_is_one_call_of_the_loops(affine, extras, momentum, monkeypatch):
    """With limits that some channels reach; all that it gives and moves is the reference's."""
    layer = randomize_(
        nk.BatchRenorm2d(4, momentum=momentum, affine=affine, activation="leaky_relu", r_max=1.2, d_max=0.3)
    )
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(6, 4, 3, 5) * 2 + 1, torch.randn(6, 4, 3, 5)
    extras = {name: torch.rand(shape) > 0.3 if name == "mask" else torch.randn(shape) for name, shape in extras.items()}
    found = {}
    for name, one in (("native", layer), ("reference", twin)):
        if name == "native":
            monkeypatch.setattr(nk.layers.BatchRenorm2d, "_update_", None)
        inputs = [x.clone().requires_grad_(), *one.parameters()]
        with select.backend(name):
            y = one(inputs[0], **extras)
            found[name] = [y.detach(), *torch.autograd.grad(y, inputs, dy), *one.buffers()]
        monkeypatch.undo()
    for ours, theirs in zip(found["native"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_step_has_the_same_gradient_and_moves_once(use_reentrant):
    layer = randomize_(nk.BatchRenorm2d(4, r_max=1.2, d_max=0.3))
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    layer(inputs[0]).backward(dy)
    checkpoint(twin, inputs[1], use_reentrant=use_reentrant).backward(dy)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    for name, stored in layer.named_buffers():
        assert torch.equal(stored, twin.get_buffer(name)), name


def test_the_papers_schedule():
    limits = nk.renorm_schedule(160_000)
    assert limits(0) == limits(5_000) == (1.0, 0.0)
    assert limits(25_000)[1] == 5.0
    assert limits(40_000) == limits(10**6) == (3.0, 5.0)
    r_max, d_max = limits(15_000)
    assert (r_max, d_max) == (pytest.approx(1 + 2 * 10 / 35), pytest.approx(2.5))
    assert nk.renorm_schedule(1_600)(400) == (3.0, 5.0)


def test_a_layer_with_a_schedule_can_be_pickled():
    layer = nk.BatchRenorm2d(4, schedule=nk.renorm_schedule(100))
    assert pickle.loads(pickle.dumps(layer)).schedule(25) == (3.0, 5.0)


def test_the_schedule_needs_a_length():
    with pytest.raises(nk.ArgumentError, match="number of training steps; got 0"):
        nk.renorm_schedule(0)


def test_the_schedule_follows_the_batches_seen():
    layer, bn = twins(nk.BatchRenorm2d, schedule=lambda step: (1.0, 0.0) if step < 8 else (3.0, 5.0))
    for step in (7, 8):
        layer.num_batches_tracked.fill_(step)
        x = randn(6, 4, 3, 3) * 2
        agrees = torch.allclose(layer(x), bn(x))
        assert agrees == (step < 8)


@pytest.mark.parametrize("options", [{"r_max": 0.9}, {"d_max": -1.0}, {"track_running_stats": False}])
def test_what_it_refuses(options):
    with pytest.raises(nk.ArgumentError, match=r"r_max must be at least 1|running statistics"):
        nk.BatchRenorm2d(3, **options)
