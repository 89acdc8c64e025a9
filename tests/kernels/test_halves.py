"""The relatives of batch normalization on the C++ loops, against the reference in float64."""

import copy

import pytest
import torch

import normkit as nk
from normkit.kernels import select
from support.case import randomize_
from support.instruction_sets import runnable, using

C = 6

LAYERS = {
    "accumulated": lambda **o: nk.AccumulatedBatchNorm2d(C, micro_batches=3, **o),
    "switchable": lambda **o: nk.SwitchableNorm2d(C, **o),
    "switchable, no affine": lambda **o: nk.SwitchableNorm2d(C, affine=False, **o),
    "moving": lambda **o: nk.MovingBatchNorm2d(C, buffer_size=2, warmup=0, **o),
    "moving, shift": lambda **o: nk.MovingBatchNorm2d(C, buffer_size=2, warmup=0, affine="shift", **o),
    "ghost": lambda **o: nk.GhostBatchNorm2d(C, chunk_size=2, **o),
    "ghost, uneven": lambda **o: nk.GhostBatchNorm2d(C, chunk_size=4, **o),
    "renorm": lambda **o: nk.BatchRenorm2d(C, **o),
}
GATED = {
    "evo b0": lambda: nk.EvoNormB0(C),
    "evo b0, scale": lambda: nk.EvoNormB0(C, affine="scale"),
    "evo s0": lambda: nk.EvoNormS0(C, 3),
    "evo s0, no affine": lambda: nk.EvoNormS0(C, 2, affine=False),
    "frn": lambda: nk.FilterResponseNorm2d(C),
    "frn, learned eps": lambda: nk.FilterResponseNorm2d(C, learnable_eps=True),
    "frn, learned eps, no threshold": lambda: nk.FilterResponseNorm2d(C, learnable_eps=True, threshold=False),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slice": lambda x: torch.cat([x, torch.randn_like(x)], 1)[:, :C],
}
SHAPES = [(6, C, 5, 7), (6, C, 9, 13), (6, C, 1, 2)]


def trained(layer, x, dy, **call):
    """Output, gradients and buffers of two steps: windows and rings have something in them at the second."""
    first = layer(x[0].detach().requires_grad_(), **call)
    first.backward(dy)
    layer.zero_grad()
    own = x[1].detach().requires_grad_()
    y = layer(own, **call)
    y.backward(dy)
    gradients = {f"d{name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": own.grad, **gradients, **dict(layer.named_buffers())}


def assert_close_to(found, truth, units):
    for name, expected in truth.items():
        value = found[name]
        if not value.is_floating_point():
            assert torch.equal(value, expected), name
            continue
        largest = expected.abs().max().item() + 1
        error = (value.double() - expected.double()).abs().max().item()
        assert error <= units * torch.finfo(value.dtype).eps * largest, (name, error, largest)


def on_loops_and_in_double(layer, x, dy, units=64, **call):
    twin = copy.deepcopy(layer).double()
    wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in call.items()}
    with select.backend("native"):
        found = trained(layer, x, dy, **call)
    with select.backend("reference"):
        truth = trained(twin, x.double(), dy.double(), **wide)
    assert found["y"].stride() == torch.empty_like(x[1]).stride()
    assert_close_to(found, truth, units)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_training(name, shape, layout):
    layer = randomize_(LAYERS[name](activation="silu"))
    x = torch.stack([torch.randn(shape), 2 * torch.randn(shape) + 1])
    x = [LAYOUTS[layout](t) for t in x]
    dy, residual = torch.randn(shape), LAYOUTS[layout](torch.randn(shape))
    on_loops_and_in_double(layer, _Pair(x), dy, residual=residual)


class _Pair(list):
    def double(self):
        return _Pair(t.double() for t in self)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name, dtype):
    layer = randomize_(LAYERS[name](activation="relu"))
    x = _Pair(torch.randn(2, 6, C, 5, 5).to(dtype))
    on_loops_and_in_double(layer, x, torch.randn(6, C, 5, 5).to(dtype), units=64)


@pytest.mark.parametrize("padding", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["accumulated", "ghost", "ghost, uneven", "renorm"])
def test_with_a_mask(name, padding):
    mask = torch.rand(6, 5, 5) < 0.7
    mask[:, 0, :2] = True
    x = torch.randn(2, 6, C, 5, 5)
    x = torch.where(mask.unsqueeze(1), x, padding)
    on_loops_and_in_double(randomize_(LAYERS[name]()), _Pair(x), torch.randn(6, C, 5, 5), mask=mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATED)
def test_a_function_of_its_own(name, dtype, shape, layout):
    x = _Pair(LAYOUTS[layout](torch.randn(shape).to(dtype)) for _ in range(2))
    for training in (True, False):
        layer = randomize_(GATED[name]()).train(training)
        on_loops_and_in_double(layer, x, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("name", [*LAYERS, *GATED])
def test_every_instruction_set(name, isa):
    layer = randomize_((LAYERS | GATED)[name]())
    x = _Pair(torch.randn(2, 6, C, 5, 7))
    with using(isa):
        on_loops_and_in_double(layer, x, torch.randn(6, C, 5, 7))


@pytest.mark.parametrize("name", [*LAYERS, *GATED])
def test_second_derivatives_are_those_of_the_reference(name):
    build = LAYERS[name] if name in LAYERS else GATED[name]
    layer = randomize_(build())
    before, x, dy, direction = torch.randn(4, 6, C, 3, 3)
    found = []
    for backend, dtype in (("native", torch.float32), ("reference", torch.float64)):
        twin, own = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
        with select.backend(backend):
            twin(before.to(dtype))  # so that windows have something in them
            (dx,) = torch.autograd.grad(twin(own), own, dy.to(dtype), create_graph=True)
            found.append(torch.autograd.grad((dx * direction.to(dtype)).sum(), own)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=2e-5)


def test_a_statistic_that_is_not_a_number_stays_where_it_is():
    """In one example, or in the threshold: torch.maximum passes a NaN on from either side."""
    x = torch.randn(4, C, 3, 3)
    x[1, 2] = float("nan")
    for build in GATED.values():
        layer = randomize_(build())
        with torch.no_grad():
            expected = copy.deepcopy(layer).double()(x.double()).isnan()
            assert torch.equal(layer(x).isnan(), expected)
    frn = nk.FilterResponseNorm2d(C)
    with torch.no_grad():
        frn.tau[3] = float("nan")
        assert frn(torch.randn(4, C, 3, 3)).isnan().flatten(2).all(2).any(0).tolist() == [i == 3 for i in range(C)]


def test_what_is_never_cut_off_gives_the_threshold_no_gradient():
    frn = nk.FilterResponseNorm2d(C)
    with torch.no_grad():
        frn.tau.fill_(-1e3)
    frn(torch.randn(4, C, 3, 3)).backward(torch.randn(4, C, 3, 3))
    assert torch.equal(frn.tau.grad, torch.zeros(C))
