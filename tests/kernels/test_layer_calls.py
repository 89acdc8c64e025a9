"""Calls of layers without options: which go straight to torch's operator, and that they compute the same."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.kernels import core, layer_calls, select
from support.case import randomize_

needs_core = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))

STRAIGHT = [
    (lambda: nk.BatchNorm1d(6), lambda: nn.BatchNorm1d(6), (8, 6, 2)),
    (lambda: nk.BatchNorm2d(6), lambda: nn.BatchNorm2d(6), (4, 6, 2, 2)),
    (lambda: nk.GroupNorm(3, 6, activation="relu"), lambda: nn.Sequential(nn.GroupNorm(3, 6), nn.ReLU()), (4, 6, 2)),
    (lambda: nk.GroupNorm(3, 6), lambda: nn.GroupNorm(3, 6), (4, 6, 2)),
    (lambda: nk.GroupNorm(6, 6), lambda: nn.InstanceNorm1d(6, affine=True), (4, 6, 2)),
    (lambda: nk.InstanceNorm2d(6), lambda: nn.InstanceNorm2d(6), (4, 6, 2, 2)),
    (lambda: nk.LayerNorm([2, 6]), lambda: nn.LayerNorm([2, 6]), (8, 2, 6)),
]


@pytest.fixture
def all_small(monkeypatch):
    monkeypatch.setattr(layer_calls, "SMALL", dict.fromkeys(layer_calls.SMALL, 1000))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("ours", "theirs", "shape"), STRAIGHT)
def test_small_tensors_go_straight_to_torchs_operator(ours, theirs, shape, training, all_small, counted):
    layer, twin = randomize_(ours()).train(training), theirs().train(training)
    norm = twin[0] if isinstance(twin, nn.Sequential) else twin
    norm.load_state_dict(layer.state_dict())
    xs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    xs[1].data.copy_(xs[0].data)
    dy = torch.randn(shape)
    ys = [layer(xs[0]), twin(xs[1])]
    for y in ys:
        y.backward(dy)
    if isinstance(layer, nn.LayerNorm):  # the loops keep parameters' gradients
        assert counted.calls > 0
        torch.testing.assert_close(*ys)
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-5, atol=1e-6)
        return
    assert counted.calls == 0
    assert torch.equal(*ys)
    assert torch.equal(xs[0].grad, xs[1].grad)
    for p, q in zip(layer.parameters(), norm.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for name, stored in norm.named_buffers():
        assert torch.equal(layer.get_buffer(name), stored), name


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("ours", "theirs", "shape"), STRAIGHT)
def test_small_tensors_of_other_types_keep_ours(ours, theirs, shape, training, all_small):
    for dtype, state in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64,) * 2):
        layer = randomize_(ours()).to(state).train(training)
        x = torch.randn(shape).to(dtype)
        with select.backend("reference"):
            expected = copy.deepcopy(layer)(x)
        tolerance = 0.04 if dtype is torch.bfloat16 else 1e-12
        torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(8, 6), (6,), (2, 5, 6)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_small_layer_norm_in_training_goes_to_torchs_operator_for_groups(shape, activation, all_small, counted):
    layer, twin = randomize_(nk.LayerNorm(6, activation=activation)), nn.LayerNorm(6)
    twin.load_state_dict(layer.state_dict())
    x, dy, ddx = torch.randn(3, *shape)
    found = []
    for call in (layer, lambda t: twin(t) if activation is None else twin(t).relu()):
        own = x.clone().requires_grad_()
        y = call(own)
        norm = layer if call is layer else twin
        first = torch.autograd.grad(y, [own, *norm.parameters()], dy, create_graph=True)
        found.append([y, *first, *torch.autograd.grad(first[0], [own, norm.weight], ddx)])
    assert counted.calls == 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_small_layer_norm_whose_parameters_alone_are_trained_keeps_ours(all_small, counted):
    layer, x = nk.LayerNorm(6), torch.randn(8, 6)
    layer(x).sum().backward()  # torch's operator for groups would end the process here
    assert counted.calls > 0
    torch.testing.assert_close(layer.bias.grad, torch.full((6,), 8.0))


def test_small_tensors_are_refused_with_our_words(all_small):
    for layer, x, error in [
        (nk.BatchNorm1d(6), torch.randn(1, 6), "more than 1 value per channel"),
        (nk.BatchNorm1d(6), torch.randn(4, 5), r"needs \(N, 6\) or"),
        (nk.BatchNorm2d(6), torch.randn(4, 6), r"needs \(N, 6, H, W\)"),
        (nk.LayerNorm([2, 6]), torch.randn(6), r"needs \(..., 2, 6\)"),
    ]:
        with pytest.raises(nk.ShapeError, match=error):
            layer(x)
    assert nk.BatchNorm1d(6).num_batches_tracked == 0


def test_small_tensors_under_autocast_and_in_a_repeated_forward(all_small):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nk.LayerNorm(6)(torch.randn(8, 6).bfloat16()).dtype == torch.bfloat16
    layer, x = nk.BatchNorm1d(6), torch.randn(8, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 1


@needs_core
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nk.BatchNorm1d(64, activation="relu"), torch.randn(32, 64)),
        (nk.BatchNorm1d(64), torch.randn(32, 64)),
        (nk.BatchNorm1d(64), torch.randn(600, 64)),
        (nk.LayerNorm(64), torch.randn(33, 64, requires_grad=True)),
        (nk.LayerNorm(64), torch.randn(2, 2, 4, 64, requires_grad=True)),
        (nk.RMSNorm(64), torch.randn(32, 64)),
        (nk.GroupNorm(8, 64), torch.randn(32, 64, 8, 8).to(memory_format=torch.channels_last)),
        (nk.GroupNorm(8, 64), torch.randn(300, 64)),
        (nk.BatchNorm2d(64), torch.randn(4, 64, 9, 9)),
        (nk.BatchNorm2d(64), torch.randn(16, 64, 2, 2)),
        (nk.BatchNorm2d(64, activation="relu"), torch.randn(4, 64, 4, 4)),
        (nk.BatchNorm2d(64), torch.randn(4, 64, 1, 1)),
        (nk.BatchNorm2d(64).eval(), torch.randn(16, 64, 2, 2)),
        (nk.InstanceNorm2d(64), torch.randn(4, 64, 8, 8)),
        (nk.LayerNorm(600), torch.randn(600, 32).t()),
        (nk.LayerNorm(64).bfloat16(), torch.randn(32, 64).bfloat16()),
        (nk.LayerNorm(1024), torch.randn(1024, 1024)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(tuple(v.shape)),
)
def test_the_loops_keep_what_they_do_faster(layer, x, as_shipped, counted):
    layer(x)
    assert counted.calls > 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nk.InstanceNorm2d(8), (4, 8, 3, 3)),
        (nk.GroupNorm(8, 8), (4, 8, 3, 3)),
        (nk.GroupNorm(2, 8), (4, 8, 3, 3)),
        (nk.BatchNorm2d(8), (4, 8, 3, 3)),
        (nk.BatchNorm3d(8), (4, 8, 3, 3, 3)),
    ],
)
def test_small_channels_last_stays_so(layer, shape, as_shipped):
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    assert layer(x).is_contiguous(memory_format=memory_format)


def test_a_checkpointed_layer_norm_is_the_plain_one(as_shipped):
    """Reentrant checkpointing runs forward without a gradient, and again with one: both must be the same call."""
    found = []
    for run in (lambda layer, x: layer(x), lambda layer, x: checkpoint(layer, x, use_reentrant=True)):
        torch.manual_seed(0)
        layer, x = randomize_(nk.LayerNorm(6)), torch.randn(8, 6, requires_grad=True)
        y = run(layer, x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, layer.weight.grad))
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_traced_small_call_asks_nothing_of_its_sizes(as_shipped):
    layer, shape = nk.LayerNorm(8).eval(), (4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(layer, torch.randn(shape), check_trace=False)


@needs_core
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nk.BatchNorm1d(64), (300, 64)),
        (lambda: nk.BatchNorm1d(64), (30, 64, 7)),
        (lambda: nk.BatchNorm2d(64), (4, 64, 4, 4)),
        (lambda: nk.BatchNorm2d(64).eval(), (4, 64, 4, 4)),
        (lambda: nk.BatchNorm2d(64).eval(), (1, 64, 1, 1)),
        (lambda: nk.BatchNorm2d(8, activation="relu"), (16, 8, 15, 17)),
        (lambda: nk.GroupNorm(8, 64), (33, 64, 5, 5)),
        (lambda: nk.GroupNorm(8, 64, activation="silu"), (33, 64, 21, 20)),
        (lambda: nk.InstanceNorm2d(64, affine=True), (3, 64, 4, 5)),
        (lambda: nk.LayerNorm(64), (32, 64)),
        (lambda: nk.LayerNorm(64), (601, 64)),
        (lambda: nk.LayerNorm(600), (1001, 600)),
        (lambda: nk.RMSNorm(64), (601, 64)),
    ],
)
def test_bits_do_not_depend_on_the_number_of_threads(build, shape, as_shipped):
    """Wherever a call goes: a run that is resumed on another machine must go on as it began."""
    first = randomize_(build())
    x, dy = torch.randn(2, *shape)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            layer, own = copy.deepcopy(first), x.clone().requires_grad_()
            y = layer(own)
            y.backward(dy)
            found.append([y.detach(), own.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@needs_core
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nk.BatchNorm1d(64), torch.randn(2, 64, 9)),
        (nk.BatchNorm2d(64), torch.randn(4, 64, 4, 4)),
        (nk.BatchNorm2d(64, activation="relu"), torch.randn(1, 64, 5, 5)),
        (nk.BatchNorm2d(64).eval(), torch.randn(1, 64, 7, 7)),
        (nk.GroupNorm(8, 64), torch.randn(32, 64, 8, 8)),
        (nk.LayerNorm(64), torch.randn(16, 64, requires_grad=True)),
        (nk.LayerNorm(64).eval().requires_grad_(False), torch.randn(64, 64).t()),
        (nk.LayerNorm(768).requires_grad_(False), torch.randn(1024, 768)),
        (nk.LayerNorm(256).requires_grad_(False), torch.randn(5000, 256)),
        (nk.LayerNorm(256, elementwise_affine=False), torch.randn(5000, 256)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(tuple(v.shape)),
)
def test_torch_gets_what_it_does_faster(layer, x, as_shipped, counted):
    layer(x)
    assert counted.calls == 0
    with select.backend("native"):  # but a name is a name
        layer(x)
    assert counted.calls > 0
