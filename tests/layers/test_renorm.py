"""Batch renormalization: its ties to BatchNorm, its limits and its schedule."""

import copy
import importlib
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


# Warm-up


def warming(warmup_steps=3, seen=0, dtype=torch.float32, **options):
    """A renorm in random state that has seen so many batches, with limits that most channels reach."""
    layer = randomize_(nk.BatchRenorm2d(4, warmup_steps=warmup_steps, r_max=1.3, d_max=0.2, **options)).to(dtype)
    layer.num_batches_tracked.fill_(seen)
    return layer


def without_warmup(layer, kind=nk.BatchRenorm2d, **options):
    twin = kind(4, momentum=layer.momentum, activation=layer.activation, **options).to(layer.weight.dtype)
    twin.load_state_dict(layer.state_dict())
    return twin


def stepped(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_warm_up_is_batch_norm_and_then_it_is_renorm_bit_for_bit(backend, momentum):
    layer = warming(momentum=momentum, activation="leaky_relu")
    with select.backend(backend):
        for step in range(6):
            still = without_warmup(layer, r_max=1.0, d_max=0.0)
            limited = without_warmup(layer, r_max=1.3, d_max=0.2)
            bn = without_warmup(layer, nk.BatchNorm2d)
            x, dy = torch.randn(6, 4, 3, 3) * 2 + 1, torch.randn(6, 4, 3, 3)
            found = stepped(layer, x, dy)
            expected = stepped(bn if step < 3 else limited, x, dy)
            assert all(map(torch.equal, found, expected)), step
            stepped(still, x, dy)  # running statistics move as a renorm's do, whatever the limits are
            assert all(torch.equal(t, still.state_dict()[name]) for name, t in layer.state_dict().items())
            assert torch.equal(found[0], stepped(without_warmup(layer, nk.BatchNorm2d), x, dy)[0]) == (step < 3)


def test_as_torchrl_writes_it():
    """The correction of its BatchRenorm1d: by a factor that is 0 in the warm-up, and 1 from its end on."""
    layer = randomize_(nk.BatchRenorm1d(4, warmup_steps=2, r_max=1.5, d_max=0.4)).double()
    layer.num_batches_tracked.zero_()
    for step in range(4):
        x = randn(8, 4) * 2 + 1
        running_mean, running_std = layer.running_mean.clone(), (layer.running_var + layer.eps).sqrt()
        mean, std = x.mean(0), (x.var(0, unbiased=False) + layer.eps).sqrt()
        r = (std / running_std).clamp(1 / 1.5, 1.5)
        d = ((mean - running_mean) / running_std).clamp(-0.4, 0.4)
        factor = min(step // 2, 1)
        r, d = 1 + (r - 1) * factor, d * factor
        close(layer(x), layer.weight * ((x - mean) / std * r + d) + layer.bias)


def test_a_run_goes_on_from_the_middle_of_its_warm_up():
    layer, batches = warming(warmup_steps=4), [torch.randn(6, 4, 3, 3) + i for i in range(6)]
    whole = copy.deepcopy(layer)
    expected = [whole(x) for x in batches]
    for x in batches[:2]:
        layer(x)
    resumed = nk.BatchRenorm2d(4, warmup_steps=4, r_max=1.3, d_max=0.2)
    resumed.load_state_dict(layer.state_dict())
    assert all(map(torch.equal, map(resumed, batches[2:]), expected[2:]))
    assert resumed.num_batches_tracked == 6


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_warm_up_too(duplicate):
    layer = warming(seen=1)
    twin, x = duplicate(layer), torch.randn(6, 4, 3, 3)
    assert all(torch.equal(twin(x), layer(x)) for _ in range(4))
    assert "warmup_steps=3" in repr(twin)
    assert "warmup_steps" not in repr(nk.BatchRenorm2d(4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compiled_graph_serves_before_and_after(backend):
    testing = importlib.import_module("torch._dynamo.testing")  # takes long, and is for this test alone
    torch.compiler.reset()
    layer = warming(dtype=torch.float64)
    twin, graphs = copy.deepcopy(layer), testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for _ in range(6):
        x, dy = randn(6, 4, 3, 3) * 2 + 1, randn(6, 4, 3, 3)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y, z = compiled(inputs[0]), twin(inputs[1])
        y.backward(dy)
        z.backward(dy)
        close(y, z)
        close(inputs[0].grad, inputs[1].grad)
    for name, t in twin.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], t, rtol=1e-12, atol=1e-12)
    assert graphs.frame_count == 1  # the number of batches is not part of what was compiled
    torch.compiler.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_step_at_the_end_of_the_warm_up(use_reentrant):
    """When the forward is repeated, the count has moved on."""
    layer = warming(seen=2)
    twin, x, dy = copy.deepcopy(layer), torch.randn(6, 4, 3, 3) + 1, torch.randn(6, 4, 3, 3)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    layer(inputs[0]).backward(dy)
    checkpoint(twin, inputs[1], use_reentrant=use_reentrant).backward(dy)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert layer.num_batches_tracked == twin.num_batches_tracked == 3


def test_a_layer_that_was_pickled_before_there_was_a_warm_up():
    layer = nk.BatchRenorm2d(4)
    del vars(layer)["warmup_steps"]
    assert pickle.loads(pickle.dumps(layer))(torch.randn(3, 4, 2, 2)).isfinite().all()


@pytest.mark.parametrize("warmup_steps", [-1, 2.0, True, None, "ten"])
def test_a_warm_up_that_is_no_number_of_batches(warmup_steps):
    with pytest.raises(
        nk.ArgumentError, match=f"warmup_steps must be a number of batches, 0 or more; got {warmup_steps!r}"
    ):
        nk.BatchRenorm2d(3, warmup_steps=warmup_steps)


def test_a_warm_up_beside_a_schedule():
    with pytest.raises(
        nk.ArgumentError, match="warmup_steps and schedule both set the first limits; got warmup_steps=5"
    ):
        nk.BatchRenorm2d(3, warmup_steps=5, schedule=nk.renorm_schedule(100))


@pytest.mark.parametrize("options", [{"r_max": 0.9}, {"d_max": -1.0}, {"track_running_stats": False}])
def test_what_it_refuses(options):
    with pytest.raises(nk.ArgumentError, match=r"r_max must be at least 1|running statistics"):
        nk.BatchRenorm2d(3, **options)
