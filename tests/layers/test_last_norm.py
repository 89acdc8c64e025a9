"""A sum that is normalized in the pass that adds: against the addition and torch's norm, one after the other."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.testing import assert_close

import normkit as nk
from normkit.kernels import layer_calls, select
from support.case import randomize_
from support.depth import thinned
from support.twins import close, randn

BUILDS = {
    "layer": (nk.LayerNorm, nn.LayerNorm),
    "layer, no bias": (lambda n, **k: nk.LayerNorm(n, bias=False, **k), lambda n: nn.LayerNorm(n, bias=False)),
    "layer, bare": (
        lambda n, **k: nk.LayerNorm(n, elementwise_affine=False, **k),
        lambda n: nn.LayerNorm(n, elementwise_affine=False),
    ),
    "rms": (nk.RMSNorm, nn.RMSNorm),
    "rms, bare": (
        lambda n, **k: nk.RMSNorm(n, elementwise_affine=False, **k),
        lambda n: nn.RMSNorm(n, elementwise_affine=False),
    ),
}
builds = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
# Of lines shorter and longer than a vector, than a step and than what is summed at once; and of several dimensions.
SHAPES = {
    "odd": (5, 13),
    "sequence": (3, 4, 96),
    "many": (67, 40),
    "long": (3, 9001),
    "maps": (2, 3, 4, 5),
    "one": (7,),
}


def twins(build, size, activation=None):
    ours, theirs = build
    layer = randomize_(ours(size, activation=activation)).double()
    twin = theirs(size).double()
    twin.load_state_dict(layer.state_dict())
    return layer, twin


def run(layer, one, other, parameters=(), weights=None):
    """What a call returns, and the gradients of all that it took, with the weights of what came out."""
    y, total = layer(one, other)
    dy, dtotal = weights
    parts = [out * w for out, w in ((y, dy), (total, dtotal)) if w is not None]
    return (y, total), torch.autograd.grad(sum(p.sum() for p in parts), (one, other, *parameters))


@pytest.mark.parametrize("used", thinned(["both", "output", "sum"], ["both"].__contains__))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@builds
def test_as_an_addition_and_a_norm(build, shape, used):
    layer, twin = twins(build, shape[-1])
    one, other = (randn(*shape).requires_grad_() for _ in range(2))
    weights = randn(*shape) if used != "sum" else None, randn(*shape) if used != "output" else None
    parameters = [tuple(module.parameters()) if used != "sum" else () for module in (layer, twin)]
    found = run(lambda a, b: layer(a, add=b), one, other, parameters[0], weights)
    wanted = run(lambda a, b: (twin(a + b), a + b), one, other, parameters[1], weights)
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", thinned([None, "relu", "silu", "hardswish"], [None, "hardswish"].__contains__))
@builds
def test_the_bits_are_those_of_our_own_norm_of_the_sum(build, activation, dtype):
    layer, _ = twins(build, 96, activation)
    layer = layer.to(dtype)
    one, other = (randn(6, 5, 96).to(dtype).requires_grad_() for _ in range(2))
    y, total = layer(one, add=other)
    assert torch.equal(total, one + other)
    with select.backend("native"):
        assert torch.equal(y, layer(one + other))
    with torch.no_grad():
        again = layer(one, add=other)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], total)


def test_gradients_that_must_be_copied_first():
    """A gradient of another layout or type is copied for the loops, and that copy must outlive their call."""
    layer, twin = twins(BUILDS["layer"], 40)
    one, other = (randn(60, 40).requires_grad_() for _ in range(2))
    parameters = tuple(layer.parameters())
    weights = randn(40, 60).t(), randn(40, 60).t()
    found = run(lambda a, b: layer(a, add=b), one, other, parameters, weights)
    wanted = run(lambda a, b: (twin(a + b), a + b), one, other, tuple(twin.parameters()), weights)
    for a, b in zip(found[1], wanted[1], strict=True):
        close(a, b, 1e-11)


@pytest.mark.parametrize(
    ("rows", "backend", "is_one"), [(4, "auto", True), (3, "auto", False), (3, "native", True), (4, "torch", False)]
)
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_one_call_of_the_loops_does_it_unless_there_are_few_values(monkeypatch, kind, rows, backend, is_one):
    calls = []
    whole = layer_calls.last_norm_of_sum
    monkeypatch.setattr(layer_calls, "last_norm_of_sum", lambda *a: calls.append(whole(*a)) or calls[-1])
    monkeypatch.setitem(layer_calls.SMALL, "sum", 64)
    with select.backend(backend):
        nk.RMSNorm(16)(torch.randn(rows, 16), add=kind(torch.randn(rows, 16)))
    assert [found is not None for found in calls] == [True] * is_one


@builds
def test_what_the_loops_do_not_take(build):
    layer, twin = twins(build, 6)
    one, other, residual = (randn(4, 5, 6) for _ in range(3))
    for a, b in (
        (one.transpose(0, 1), other.transpose(0, 1)),
        (one, other[:, :1].expand(4, 5, 6)),
        (one.expand(2, 4, 5, 6), other.expand(2, 4, 5, 6)),
    ):
        y, total = layer(a, add=b)
        close(total, a + b)
        close(y, twin(a + b))
    y, total = layer(one, add=other, residual=residual)
    close(y, twin(one + other) + residual)
    wide, total = layer(one, add=other.float())
    assert total.dtype is torch.float64
    close(wide, twin(one + other.float()))
    for backend in ("torch", "reference"):
        with select.backend(backend):
            close(layer(one, add=other)[0], twin(one + other))
    weight = randn(4, 6)
    y, total = layer(one, add=other, weight=weight)
    bare = nn.functional.layer_norm if isinstance(layer, nn.LayerNorm) else nn.functional.rms_norm
    shift = 0 if getattr(layer, "bias", None) is None else layer.bias
    close(y, bare(one + other, (6,), eps=layer.eps) * weight[:, None] + shift)


def test_second_derivatives():
    for name in ("layer", "rms"):
        layer, _ = twins(BUILDS[name], 5)
        tensors = [randn(3, 5).requires_grad_() for _ in range(2)]
        assert torch.autograd.gradcheck(lambda a, b: layer(a, add=b), tensors)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda a, b: layer(a, add=b), tensors)  # noqa: B023


def test_values_too_large_to_be_squared_in_float():
    layer = nk.LayerNorm(64)
    one, other = torch.randn(3, 64) * 1e25, torch.randn(3, 64) * 1e25
    wanted = nn.functional.layer_norm((one + other).double(), (64,))
    assert_close(layer(one, add=other)[0].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_call_does_not_depend_on_threads(threads):
    before = torch.get_num_threads()
    try:
        found = []
        for n in (1, threads):
            torch.set_num_threads(n)
            torch.manual_seed(0)
            layer, one, other = nk.LayerNorm(256), *(torch.randn(5000, 256).requires_grad_() for _ in range(2))
            y, total = layer(one, add=other)
            ((y * y.detach()).sum() + (total * y.detach()).sum()).backward()
            found.append((y, total, one.grad, layer.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nk.RMSNorm(6)

    def forward(self, x, h):
        y, total = self.norm(x, add=h)
        return y + total


def test_traced_copied_and_compiled():
    block, x, h = Block(), torch.randn(3, 6), torch.randn(3, 6)
    wanted = block(x, h)
    assert torch.equal(fx.symbolic_trace(block)(x, h), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(block)))(x, h), wanted)
    assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(x, h), wanted)
    exported = torch.export.export(block, (x, h)).module()
    assert_close(exported(x, h), wanted)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(nk.ShapeError, match=r"needs an add of the input's shape \(3, 6\); got \(6,\)"):
        nk.LayerNorm(6)(torch.randn(3, 6), add=torch.randn(6))
    with pytest.raises(nk.ShapeError, match=r"needs \(..., 6\); got \(3, 5\)"):
        nk.RMSNorm(6)(torch.randn(3, 5), add=torch.randn(3, 5))


@pytest.mark.parametrize("backend", ["native", "torch", "reference", "auto"])
@pytest.mark.parametrize("shape", [(3, 8, 5, 4), (3, 8, 7), (2, 130, 16, 16)], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_channels_moved_last_come_back_as_rows(kind, shape, backend):
    """As from torch's layer norm, and without a second copy: what comes next reads rows."""
    build, torchs = BUILDS[kind]
    layer, x = randomize_(build(shape[1])), torch.randn(shape).movedim(1, -1).requires_grad_()
    theirs = torchs(shape[1])
    theirs.load_state_dict(layer.state_dict())
    with select.backend(backend):
        for run in (layer, lambda x: layer(x, residual=torch.zeros_like(x))):
            y, z = run(x), theirs(x)
            if kind == "layer" or backend == "native":
                assert y.is_contiguous()
            dy = torch.randn_like(z)
            leaves = [x, *layer.parameters()], [x, *theirs.parameters()]
            assert_close(y, z, rtol=1e-5, atol=1e-5)
            for a, b in zip(torch.autograd.grad(y, leaves[0], dy), torch.autograd.grad(z, leaves[1], dy), strict=True):
                assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_copy_of_channels_moved_last():
    layer, x = randomize_(nk.LayerNorm(16)), torch.randn(2, 16, 5, 5).movedim(1, -1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, torch.no_grad():
        layer.train()(x)
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::copy_") == 1
