"""Moving average batch norm: from the warmup to the rings, forwards and backwards, saved and computed again."""

import copy
import importlib

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.cases import randomize_
from support.formulas import LONG, mixed, wide


def layer_after(batches, **options):
    """A layer in random state that has seen so many batches."""
    layer = randomize_(nk.MovingBatchNorm2d(3, dtype=torch.float64, **options))
    layer.num_batches_tracked.fill_(batches)
    return layer


def batch(scale=1.3):
    return (torch.randn(2, 3, 4, 5, dtype=torch.float64) * scale + 0.3).requires_grad_()


def expected_dx(layer, x, dy):
    """The paper's backward, and the ring that it leaves."""
    var, ratio = mixed.moving_statistics(layer, x)
    std = np.sqrt(var + LONG(layer.eps)).reshape(1, -1, 1, 1)
    z, g = wide(x) / std, wide(dy) * (wide(layer.weight) * ratio).reshape(1, -1, 1, 1)
    seen, size = int(layer.num_batches_tracked), layer.buffer_size
    ring = wide(layer.recent_gradient)
    ring[seen % size] = (g * z).mean((0, 2, 3))
    average = ring[seen % size] if seen < max(size, layer.warmup) else ring.mean(0)
    return (g - z * average.reshape(1, -1, 1, 1)) / std, ring


# before and after the rings are averaged over, and the ratio comes into force
@pytest.mark.parametrize("seen", [0, 1, 9, 10, 11, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("scale", [0.02, 1.3, 300.0])
def test_forward_and_backward(seen, scale):
    layer, x = layer_after(seen, buffer_size=4, warmup=10), batch(scale)
    dy = torch.randn(x.shape, dtype=torch.float64)
    expected, (dx, ring) = mixed.moving(layer, x), expected_dx(layer, x, dy)
    y = layer(x)
    y.backward(dy)
    np.testing.assert_allclose(y.detach().numpy(), expected.astype(float), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), dx.astype(float), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(layer.recent_gradient.numpy(), ring.astype(float), rtol=1e-12, atol=1e-14)


def test_the_ratio_is_clipped():
    for scale, ratio in ((1e-4, 0.2), (1e4, 5.0)):
        layer, x = layer_after(5000, buffer_size=1), batch().detach() * scale
        free = x * layer.weight.reshape(1, 3, 1, 1) / (x.square().mean((0, 2, 3), keepdim=True) + layer.eps).sqrt()
        torch.testing.assert_close(layer(x) - layer.bias.reshape(1, 3, 1, 1), ratio * free)


def test_in_the_warmup_it_is_the_root_mean_square_of_the_batch():
    layer, x = layer_after(3), batch()
    bias, weight = (t.reshape(1, 3, 1, 1) for t in (layer.bias, layer.weight))
    plain = x / (x.square().mean((0, 2, 3), keepdim=True) + layer.eps).sqrt() * weight + bias
    y, dy = layer(x), torch.randn(x.shape, dtype=torch.float64)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(plain, x, dy))


def test_what_batches_leave_behind():
    layer = nk.MovingBatchNorm2d(3, buffer_size=3, warmup=0, momentum=0.25, dtype=torch.float64)
    squares, running = [], None
    for step in range(8):
        x = batch(1 + step)
        squares.append(x.detach().square().mean((0, 2, 3)))
        layer(x).sum().backward()
        var = squares[-1] if step < 3 else torch.stack(squares[-3:]).mean(0)
        running = var if running is None else 0.75 * running + 0.25 * var
        torch.testing.assert_close(layer.running_var, running)
        torch.testing.assert_close(layer.recent_var[step % 3], squares[-1])
        assert layer.num_batches_tracked == step + 1
    y = layer.eval()(x)
    torch.testing.assert_close(y, x / (running + layer.eps).sqrt().reshape(1, 3, 1, 1))


def test_a_run_resumes_exactly():
    layer = layer_after(1100, buffer_size=4)
    for _ in range(3):
        layer(batch()).square().sum().backward()
    resumed = nk.MovingBatchNorm2d(3, dtype=torch.float64, buffer_size=4)
    resumed.load_state_dict(layer.state_dict())
    for _ in range(3):
        x = batch()
        twin = x.detach().clone().requires_grad_()
        layer(x).square().sum().backward()
        resumed(twin).square().sum().backward()
        assert torch.equal(x.grad, twin.grad)
    for name, t in layer.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], t), name


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("seen", [0, 20, 2000])
def test_checkpointing_of_several_batches_at_once(seen, use_reentrant):
    """Forwards of several batches come before their backwards: each is computed again with what it had."""
    layer = layer_after(seen, buffer_size=4, warmup=10)
    plain = copy.deepcopy(layer)
    xs = [batch(scale) for scale in (1.0, 2.0, 3.0)]
    twins = [x.detach().clone().requires_grad_() for x in xs]
    sum(checkpoint(layer, x, use_reentrant=use_reentrant).square().sum() for x in xs).backward()
    sum(plain(x).square().sum() for x in twins).backward()
    for x, twin in zip(xs, twins, strict=True):
        assert torch.equal(x.grad, twin.grad)
    for name, t in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[name], t), name


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_compiled_past_the_warmup(backend):
    """What a backward leaves in the ring, the next one needs: the compiler must not lose it."""
    layer = layer_after(998, buffer_size=2, warmup=10)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(4):
        x = batch()
        other = x.detach().clone().requires_grad_()
        y, z = compiled(x), twin(other)
        dy = torch.randn_like(z)
        y.backward(dy)
        z.backward(dy)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-11, atol=1e-12)
        for name, t in twin.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], t, rtol=1e-12, atol=1e-13)
    torch.compiler.reset()


def test_compiled_forwards_before_backwards_are_refused():
    """Compiled, the ring is an input of the backward, and torch refuses one that another backward has written."""
    layer = layer_after(50, buffer_size=2, warmup=10)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    first, second = (compiled(batch()).sum() for _ in range(2))
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    torch.compiler.reset()


def test_past_the_warmup_the_formula_itself_is_differentiated():
    """The gradient is the paper's estimate; its own derivative, and forward mode, hold the other batches fixed."""
    layer = layer_after(50, buffer_size=3, warmup=10)
    state = copy.deepcopy(layer.state_dict())
    dy, weights = (torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in range(2))

    def estimate(x, create_graph=False):
        layer.load_state_dict(state)
        (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=create_graph)
        return (dx * weights).sum()

    x, step = batch(), torch.randn(2, 3, 4, 5, dtype=torch.float64) * 1e-6
    (found,) = torch.autograd.grad(estimate(x, create_graph=True), x)
    near = [(x + sign * step).detach().requires_grad_() for sign in (1, -1)]
    slope = (estimate(near[0]) - estimate(near[1])) / 2
    torch.testing.assert_close((found * step).sum(), slope, rtol=1e-5, atol=1e-12)

    def run(x):
        layer.load_state_dict(state)
        return layer(x)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), step)
        tangent = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
    torch.testing.assert_close(tangent, (run(near[0]) - run(near[1])) / 2, rtol=1e-5, atol=1e-11)


def test_the_compilers_operators_keep_torchs_rules():
    importlib.import_module("normkit.kernels.compile_ops")  # defines them
    x, ring = batch(), torch.randn(4, 3, dtype=torch.float64)
    per_channel = torch.rand(1, 3, 1, 1, dtype=torch.float64) + 1
    here = (torch.arange(4) == 2)[:, None]
    for exact in (True, False):
        args = (x, per_channel, per_channel, torch.tensor(exact), here, ring, 1e-5)
        torch.library.opcheck(torch.ops.normkit.moving_normalize.default, args)
    torch.library.opcheck(torch.ops.normkit.moving_remember.default, (torch.randn(3).double(), here, ring))


def test_bad_options():
    with pytest.raises(nk.ArgumentError, match=r"buffer_size must be at least 1 batch; got 0"):
        nk.MovingBatchNorm2d(3, buffer_size=0)
    with pytest.raises(nk.ArgumentError, match=r"warmup must be a number of batches.*got -1"):
        nk.MovingBatchNorm2d(3, warmup=-1)
