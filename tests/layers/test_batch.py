"""What BatchNorm has beyond the table: mask, residual, momentum, NaN, and the tools that look for a BatchNorm."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.optim.swa_utils import update_bn

import normkit as nk
from support.cases import randomize_
from support.depth import thinned

MODULES = {
    None: nn.Identity(),
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


def twins(layer):
    """A layer of ours in random state, and torch's in the same."""
    theirs = {2: nn.BatchNorm2d, 1: nn.BatchNorm1d}[2 if isinstance(layer, nn.BatchNorm2d) else 1](
        layer.num_features, layer.eps, layer.momentum
    )
    theirs.to(layer.weight.dtype).load_state_dict(randomize_(layer).state_dict())
    return layer, theirs.train(layer.training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", MODULES, ids=str)
def test_activation_and_residual_equal_torchs_modules(activation, training):
    ours, theirs = twins(nk.BatchNorm2d(4, activation=activation, dtype=torch.float64).train(training))
    x, r = (torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, z = ours(x, residual=r), MODULES[activation](theirs(x) + r)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, r, ours.weight, ours.bias], dy)
    expected = torch.autograd.grad(z, [x, r, theirs.weight, theirs.bias], dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", thinned(MODULES, ["relu"].__contains__), ids=str)
def test_residual_and_mask_gradients(activation):
    x, r = (torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(4, 5) > 0.3

    def run(x, w, b, r):
        return nk.functional.batch_norm(x, None, None, w, b, True, activation=activation, residual=r, mask=mask)

    assert torch.autograd.gradcheck(run, (x, w, b, r), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, w, b, r), check_fwd_over_rev=True)


@pytest.mark.parametrize("garbage", [0.0, 1e30, torch.nan, torch.inf])
def test_masked_positions_leave_no_trace_in_the_statistics(garbage):
    lengths = torch.tensor([7, 2, 5])
    mask = torch.arange(7) < lengths[:, None]
    x = torch.randn(3, 4, 7, dtype=torch.float64)
    ours, theirs = twins(nk.BatchNorm1d(4, dtype=torch.float64))
    y = ours(torch.where(mask[:, None], x, garbage), mask=mask)
    kept = x.movedim(1, -1)[mask]  # the unmasked positions, as rows
    z = theirs(kept)
    torch.testing.assert_close(y.movedim(1, -1)[mask], z, rtol=1e-12, atol=1e-12)
    for name, b in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_padding_that_the_loss_ignores_leaves_no_trace_in_the_gradients(garbage):
    mask = torch.arange(7) < torch.tensor([7, 2, 5])[:, None]
    x, dy = torch.randn(3, 4, 7, dtype=torch.float64), torch.randn(3, 4, 7, dtype=torch.float64) * mask[:, None]
    found = []
    layer = randomize_(nk.BatchNorm1d(4, activation="silu", dtype=torch.float64))
    for padding in (0.0, garbage):
        leaf = torch.where(mask[:, None], x, padding).requires_grad_()
        y = layer(leaf, mask=mask)
        found.append(torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_shapes_a_mask_can_have():
    x, mask = torch.randn(3, 4, 7), torch.rand(3, 7) > 0.4
    layer = randomize_(nk.BatchNorm1d(4, track_running_stats=False))
    expected = layer(x, mask=mask)
    assert torch.equal(layer(x, mask=mask[:, None]), expected)
    assert torch.equal(layer(x, mask=mask.long()), expected)
    assert not torch.equal(layer(x), expected)
    torch.testing.assert_close(layer(x, mask=torch.ones(3, 7, dtype=torch.bool)), layer(x), rtol=1e-6, atol=2e-6)


def test_a_mask_says_nothing_to_stored_statistics():
    layer = randomize_(nk.BatchNorm1d(4)).eval()
    x = torch.randn(3, 4, 7)
    assert torch.equal(layer(x, mask=torch.zeros(3, 7, dtype=torch.bool)), layer(x))


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9, 1.0, None])
def test_running_statistics_over_many_steps(momentum):
    ours, theirs = twins(nk.BatchNorm2d(3, momentum=momentum))
    eps, largest = torch.finfo(torch.float32).eps, 1.0
    for step in range(10):
        x = torch.randn(4 + step, 3, 5, 5) * (step + 1) + step
        largest = max(largest, x.abs().max().item())
        ours(x)
        theirs(x)
        # A mean that is a small rest of large values is as exact as those.
        for name, units in (("running_mean", 2 * 4 * largest), ("running_var", 2 * 24 * largest**2)):
            torch.testing.assert_close(ours.get_buffer(name), theirs.get_buffer(name), rtol=0, atol=units * eps)
        assert ours.num_batches_tracked == theirs.num_batches_tracked


def test_tracking_switched_off_late():
    """As in torch: nothing is written, and evaluation goes on using what was stored."""
    ours, theirs = twins(nk.BatchNorm2d(3))
    before = copy.deepcopy(ours.state_dict())
    ours.track_running_stats = theirs.track_running_stats = False
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    for name, t in before.items():
        assert torch.equal(ours.state_dict()[name], t)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
class TestNonFinite:
    @staticmethod
    def layer_and_batch(mode, bad):
        layer = randomize_(nk.BatchNorm2d(3, nonfinite=mode))
        x = torch.randn(4, 3, 5, 5)
        x[2, 1, 3, 3] = bad
        return layer, x, copy.deepcopy(layer.state_dict())

    def test_propagate(self, bad):
        layer, x, before = self.layer_and_batch("propagate", bad)
        layer(x)
        assert not layer.running_mean[1].isfinite()
        assert layer.running_var[[0, 2]].isfinite().all()
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1

    def test_raise(self, bad):
        layer, x, before = self.layer_and_batch("raise", bad)
        with pytest.raises(nk.NonFiniteError, match=r"channels \[1\].*skip-update"):
            layer(x)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        layer(torch.randn(4, 3, 5, 5))
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1

    def test_skip_update(self, bad):
        layer, x, before = self.layer_and_batch("skip-update", bad)
        y = layer(x)
        assert y[:, 1].isnan().all()
        assert y[:, [0, 2]].isfinite().all()
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        layer(torch.randn(4, 3, 5, 5))
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        assert layer.running_mean.isfinite().all()

    @pytest.mark.deep
    def test_compiled(self, bad):
        layer, x, before = self.layer_and_batch("skip-update", bad)
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        layer, x, before = self.layer_and_batch("raise", bad)
        with pytest.raises(RuntimeError, match="needs finite input"):
            torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        torch.compiler.reset()


def test_a_variance_that_overflows_half_precision_is_not_finite():
    layer = nk.BatchNorm1d(2, nonfinite="skip-update").half()
    layer(torch.tensor([[3000.0, 1.0], [-3000.0, 2.0]]).half())  # a tenth of 1.8e7; float16 ends at 65,504
    assert torch.equal(layer.running_var, torch.ones(2).half())


def test_pure_form_equals_the_layer_and_writes_nothing():
    for momentum in (0.3, None):
        layer = randomize_(nk.BatchNorm2d(3, momentum=momentum, activation="silu", dtype=torch.float64))
        stored = nk.Moments(layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone())
        kept = [t.clone() for t in stored]
        for _ in range(3):
            x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
            y, new = nk.functional.batch_norm_update(
                x, stored, layer.weight, layer.bias, momentum=momentum, eps=layer.eps, activation="silu"
            )
            assert all(torch.equal(a, b) for a, b in zip(stored, kept, strict=True))
            assert torch.equal(y, layer(x))
            stored = new
            kept = [t.clone() for t in stored]
        for computed, stored in ((new.mean, layer.running_mean), (new.var, layer.running_var)):
            torch.testing.assert_close(computed, stored, rtol=1e-13, atol=1e-14)  # the layer's operator moves its own
        assert torch.equal(new.count, layer.num_batches_tracked)


def test_pure_form_under_vmap_and_grad():
    """Per-model statistics and gradients of an ensemble in one call, as pytorch#85533 asks for."""
    xs = torch.randn(5, 4, 3, 6, dtype=torch.float64)
    ws = torch.randn(5, 3, dtype=torch.float64)
    stored = nk.Moments(torch.randn(5, 3).double(), torch.rand(5, 3).double() + 0.5, torch.arange(5))

    def loss(w, x, moments):
        y, new = nk.functional.batch_norm_update(x, moments, w, momentum=None)
        return y.pow(3).sum(), new

    found, new = vmap(grad(loss, has_aux=True))(ws, xs, stored)
    for i in range(5):
        w = ws[i].clone().requires_grad_()
        one, expected = loss(w, xs[i], nk.Moments(*(t[i] for t in stored)))
        one.backward()
        torch.testing.assert_close(found[i], w.grad, rtol=1e-12, atol=1e-12)
        for a, b in zip(new, expected, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


def test_functional_call_replaces_state():
    layer = randomize_(nk.BatchNorm1d(3))
    other = randomize_(nk.BatchNorm1d(3))
    x = torch.randn(6, 3)
    before = copy.deepcopy(layer.state_dict())
    state = copy.deepcopy(other.state_dict())
    assert torch.equal(functional_call(layer, state, (x,)), other(x))
    assert torch.equal(state["running_mean"], other.running_mean)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def conv_net(bn):
    return randomize_(nn.Sequential(nn.Conv2d(3, 4, 3), bn, nn.Conv2d(4, 2, 1))).double()


def test_update_bn_finds_our_layers():
    ours = conv_net(nk.BatchNorm2d(4))
    theirs = conv_net(nn.BatchNorm2d(4))
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.randn(n, 3, 8, 8, dtype=torch.float64) for n in (4, 6, 3)]
    update_bn(batches, ours)
    update_bn(batches, theirs)
    assert ours[1].num_batches_tracked == 3
    assert ours[1].momentum == 0.1
    for name, t in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
def test_conversion_to_sync_batch_norm(affine):
    model = conv_net(nk.BatchNorm2d(4, affine=affine, momentum=0.2, eps=1e-3)).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = model(x)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[1]) is nn.SyncBatchNorm
    assert (converted[1].momentum, converted[1].eps) == (0.2, 1e-3)
    torch.testing.assert_close(converted(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
def test_torchs_fusion_takes_our_layers(affine):
    model = conv_net(nk.BatchNorm2d(4, affine=affine)).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(fuse_conv_bn_eval(model[0], model[1])(x), model[:2](x), rtol=1e-11, atol=1e-11)
    if affine is True:  # torch's fusion of linear layers fails on a BatchNorm without gamma, its own included
        linear, bn = randomize_(nn.Linear(3, 4)).double().eval(), randomize_(nk.BatchNorm1d(4)).double().eval()
        rows = torch.randn(5, 3, dtype=torch.float64)
        torch.testing.assert_close(fuse_linear_bn_eval(linear, bn)(rows), bn(linear(rows)), rtol=1e-11, atol=1e-11)


def test_they_are_torchs_classes():
    for ours, theirs in (
        (nk.BatchNorm1d, nn.BatchNorm1d),
        (nk.BatchNorm2d, nn.BatchNorm2d),
        (nk.BatchNorm3d, nn.BatchNorm3d),
    ):
        assert issubclass(ours, theirs)
    assert issubclass(nk.PositionBatchNorm2d, nn.modules.batchnorm._BatchNorm)


def test_compiled_with_a_mask_and_a_residual():
    layer = randomize_(nk.BatchNorm1d(4, activation="gelu"))
    twin = copy.deepcopy(layer)
    x, r, mask = torch.randn(3, 4, 7), torch.randn(3, 4, 7), torch.rand(3, 7) > 0.3
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual=r, mask=mask), twin(x, residual=r, mask=mask), rtol=1e-6, atol=2e-6)
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        compiled(x, residual=r, mask=torch.zeros(3, 7, dtype=torch.bool))
    for name, b in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b)
    torch.compiler.reset()


def test_exported_graphs_hold_torchs_operator():
    """Quantizers, fusers and converters look for aten.batch_norm: they find it, the activation after it."""
    model = conv_net(nk.BatchNorm2d(4, activation="relu")).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8, dtype=torch.float64),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.conv2d.default", "aten.batch_norm.default", "aten.relu.default", "aten.conv2d.default"]


def test_batch_moments():
    x = torch.randn(6, 4, 5) * 3 + 7
    mask = torch.rand(6, 5) > 0.4
    m = nk.functional.batch_moments(x)
    lost = {"rtol": 24 * torch.finfo(torch.float32).eps, "atol": 0.0}  # as the bound of running variances
    torch.testing.assert_close(m.mean, x.double().mean((0, 2)), **lost)
    torch.testing.assert_close(m.unbiased_var, x.double().var((0, 2)), **lost)
    assert m.count == 30
    kept = x.double().movedim(1, -1)[mask]
    m = nk.functional.batch_moments(x, mask)
    torch.testing.assert_close(m.mean, kept.mean(0), **lost)
    torch.testing.assert_close(m.unbiased_var, kept.var(0), **lost)
    assert (m.count == mask.sum()).all()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("cls", [nk.BatchNorm1d, nn.BatchNorm1d], ids=["ours", "torch's"])
def test_batches_are_counted_on_when_the_running_statistics_were_taken_away(cls, momentum):
    layer = cls(3, momentum=momentum)
    layer.running_mean = layer.running_var = None
    for _ in range(2):
        layer(torch.randn(4, 3))
    layer.eval()(torch.randn(4, 3))
    assert layer.num_batches_tracked == 2
    layer.train().track_running_stats = False
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 2
