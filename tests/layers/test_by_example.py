"""Gamma and beta from outside, for each example its own, against the composition in torch."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels import select
from support.case import randomize_
from support.depth import thinned
from support.twins import close, randn

FUNCTIONS = {None: lambda z: z, "relu": torch.relu, "silu": nn.functional.silu}


class Row(NamedTuple):
    """A layer, one without parameters that does the same, an input, and where parameters of each example broadcast."""

    build: Any
    bare: Any
    shape: tuple[int, ...]
    view: tuple[int, ...]
    features: tuple[int, ...] = (6,)


MAPS, VIEW = (7, 6, 5, 4), (7, 6, 1, 1)
TRACKED = {"track_running_stats": True}
ROWS = {
    "batch 1d": Row(nk.BatchNorm1d, lambda: nn.BatchNorm1d(6, affine=False), (7, 6), (7, 6)),
    "batch 1d, positions": Row(nk.BatchNorm1d, lambda: nn.BatchNorm1d(6, affine=False), (7, 6, 5), (7, 6, 1)),
    "batch 2d": Row(nk.BatchNorm2d, lambda: nn.BatchNorm2d(6, affine=False), MAPS, VIEW),
    "batch 3d": Row(nk.BatchNorm3d, lambda: nn.BatchNorm3d(6, affine=False), (3, 6, 2, 5, 4), (3, 6, 1, 1, 1)),
    "ghost": Row(
        lambda n, **k: nk.GhostBatchNorm2d(n, chunk_size=3, **k),
        lambda: nk.GhostBatchNorm2d(6, chunk_size=3, affine=False),
        (6, 6, 5, 4),
        (6, 6, 1, 1),
    ),
    "split": Row(nk.SplitBatchNorm2d, lambda: nk.SplitBatchNorm2d(6, affine=False), (6, 6, 5, 4), (6, 6, 1, 1)),
    "renorm": Row(nk.BatchRenorm2d, lambda: nk.BatchRenorm2d(6, affine=False), MAPS, VIEW),
    "sync": Row(nk.SyncBatchNorm, lambda: nn.BatchNorm2d(6, affine=False), MAPS, VIEW),
    "instance": Row(nk.InstanceNorm2d, lambda: nn.InstanceNorm2d(6), MAPS, VIEW),
    "instance, tracked": Row(
        lambda n, **k: nk.InstanceNorm2d(n, affine=True, **TRACKED, **k),
        lambda: nn.InstanceNorm2d(6, **TRACKED),
        MAPS,
        VIEW,
    ),
    "group": Row(lambda n, **k: nk.GroupNorm(3, n, **k), lambda: nn.GroupNorm(3, 6, affine=False), MAPS, VIEW),
    "group, no positions": Row(
        lambda n, **k: nk.GroupNorm(3, n, **k), lambda: nn.GroupNorm(3, 6, affine=False), (7, 6), (7, 6)
    ),
    "layer": Row(nk.LayerNorm, lambda: nn.LayerNorm(6, elementwise_affine=False), (7, 5, 6), (7, 1, 6)),
    "layer, two": Row(
        lambda _, **k: nk.LayerNorm([5, 6], **k),
        lambda: nn.LayerNorm([5, 6], elementwise_affine=False),
        (7, 3, 5, 6),
        (7, 1, 5, 6),
        (5, 6),
    ),
    "rms": Row(nk.RMSNorm, lambda: nn.RMSNorm(6, elementwise_affine=False), (7, 5, 6), (7, 1, 6)),
}
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def made(row, activation=None):
    """A layer in a random state, and what it does without parameters, in the same state; in double."""
    layer = randomize_(row.build(6, activation=activation)).double()
    bare = row.bare().double()
    own = layer.state_dict()
    bare.load_state_dict({name: own[name] for name in bare.state_dict()})
    if getattr(bare, "momentum", None) is not None:
        layer.momentum = bare.momentum = 0.3
    return layer, bare


def of_examples(row):
    return [randn(row.shape[0], *row.features).requires_grad_() for _ in range(2)]


def input_of(row, channels_last=False):
    x = 3 * randn(*row.shape) + 2
    if channels_last and x.dim() in (4, 5):
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x.requires_grad_()


def agree(found, wanted, inputs):
    """The same outputs and the same gradients, of sums with weights of either sign."""
    close(found, wanted)
    dy = torch.randn_like(wanted)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, dy) for y in (found, wanted)), strict=True):
        close(ours, theirs, 1e-11)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", thinned(FUNCTIONS, ["relu"].__contains__))
@rows
def test_as_the_composition(row, activation, training, channels_last):
    layer, bare = (module.train(training) for module in made(row, activation))
    x, (weight, bias), residual = input_of(row, channels_last), of_examples(row), randn(*row.shape).requires_grad_()
    z = bare(x) * weight.view(row.view) + bias.view(row.view) + residual
    y = layer(x, weight=weight, bias=bias, residual=residual)
    agree(y, FUNCTIONS[activation](z), (x, weight, bias, residual))
    own = layer.state_dict()
    for name, t in bare.state_dict().items():
        close(own[name], t)


def test_a_shuffled_norm_keeps_examples_and_their_parameters_together():
    layer = randomize_(nk.ShuffledBatchNorm2d(6, chunk_size=3)).double()
    bare = nk.ShuffledBatchNorm2d(6, chunk_size=3, affine=False).double()
    x, weight, bias = randn(9, 6, 5, 4), randn(9, 6), randn(9, 6)
    torch.manual_seed(3)
    y = layer(x, weight=weight, bias=bias)
    torch.manual_seed(3)
    close(y, bare(x) * weight[..., None, None] + bias[..., None, None])


@rows
def test_one_of_them_beside_the_layers_own_and_both_for_all_examples(row):
    layer, bare = (module.eval() for module in made(row))
    x, (weight, _) = input_of(row), of_examples(row)
    own = 0 if getattr(layer, "bias", None) is None else layer.bias
    layout = (1, *row.view[1:])
    own = own if isinstance(own, int) else own.view(layout)
    agree(layer(x, weight=weight), bare(x) * weight.view(row.view) + own, (x, weight))
    shared, beside = (randn(*row.features).requires_grad_() for _ in range(2))
    wanted = bare(x) * shared.view(layout) + beside.view(layout)
    agree(layer(x, weight=shared, bias=beside), wanted, (x, shared, beside))
    mixed = bare(x) * weight.view(row.view) + beside.view(layout)
    agree(layer(x, weight=weight, bias=beside), mixed, (x, weight, beside))


@pytest.mark.parametrize("name", ["batch 2d", "group", "layer"])
def test_second_derivatives(name):
    row = ROWS[name]
    layer, _ = made(row, "silu")
    layer.momentum = 0.0  # or every call would differ
    x = randn(*{"batch 2d": (3, 6, 2, 1), "group": (3, 6, 2, 1), "layer": (3, 2, 6)}[name]).requires_grad_()
    weight, bias = (randn(3, *row.features).requires_grad_() for _ in range(2))

    def call(x, weight, bias):
        return layer(x, weight=weight, bias=bias)

    assert torch.autograd.gradgradcheck(call, (x, weight, bias))


@pytest.mark.parametrize("name", ["batch 2d", "instance", "group", "layer", "rms"])
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_all_backends_agree(name, backend):
    row = ROWS[name]
    layer, bare = made(row, "relu")
    x, (weight, bias) = input_of(row), of_examples(row)
    with select.backend(backend):
        y = layer(x, weight=weight, bias=bias)
    agree(y, torch.relu(bare(x) * weight.view(row.view) + bias.view(row.view)), (x, weight, bias))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", thinned(FUNCTIONS, ["silu"].__contains__))
@pytest.mark.parametrize("name", ["batch 2d", "group", "layer", "rms"])
def test_in_smaller_types(name, activation, dtype, training):
    row = ROWS[name]
    layer, bare = (module.train(training) for module in made(row, activation))
    x, (weight, bias) = (input_of(row) * 1).to(dtype), (t.detach().to(dtype) for t in of_examples(row))
    tensors = [t.detach().requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y = layer.to(dtype)(tensors[0], weight=tensors[1], bias=tensors[2])
    assert y.dtype is dtype
    z = bare.to(dtype).double()(wide[0]) * wide[1].view(row.view) + wide[2].view(row.view)
    dy = torch.randn(row.shape).to(dtype)
    found, wanted = [y, *torch.autograd.grad(y, tensors, dy)], FUNCTIONS[activation](z)
    for ours, theirs in zip(found, [wanted, *torch.autograd.grad(wanted, wide, dy.double())], strict=True):
        # A few roundings, of sums of at most 140 terms, none of which is much larger than the largest result.
        off = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert off < 40 * torch.finfo(dtype).eps


# Of an example: one task's lines, several tasks', lines that are gone over by columns elsewhere, and one example alone.
@pytest.mark.parametrize("shape", [(5, 7, 6), (3, 400, 300), (2, 2, 3, 9000), (1, 9, 5)])
@pytest.mark.parametrize("build", [nk.LayerNorm, nk.RMSNorm])
def test_lines_with_parameters_of_their_example_are_left_to_the_loops(build, shape):
    layer = build(shape[-1], activation="relu").double()
    bare = (nn.LayerNorm if build is nk.LayerNorm else nn.RMSNorm)(shape[-1], elementwise_affine=False).double()
    x, weight, bias = (randn(*size).requires_grad_() for size in (shape, *[(shape[0], shape[-1])] * 2))
    view = (shape[0], *(1,) * (len(shape) - 2), shape[-1])
    with select.backend("native"):
        y = layer(x, weight=weight, bias=bias)
    assert "NormalizeAlone" in type(y.grad_fn).__name__
    agree(y, torch.relu(bare(x) * weight.view(view) + bias.view(view)), (x, weight, bias))


@pytest.mark.parametrize("build", [nk.LayerNorm, nk.RMSNorm])
def test_bits_of_lines_do_not_depend_on_the_number_of_threads(build):
    layer, threads, found = build(96), torch.get_num_threads(), []
    tensors = [torch.randn(size, requires_grad=True) for size in ((6, 200, 96), (6, 96), (6, 96))]
    dy = torch.randn(6, 200, 96)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = layer(tensors[0], weight=tensors[1], bias=tensors[2])
            found.append((y.detach(), *torch.autograd.grad(y, tensors, dy)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_few_lines_and_strided_ones_run_without_the_loops_for_them():
    layer, bare = nk.LayerNorm(6).double(), nn.LayerNorm(6, elementwise_affine=False).double()
    weight, bias = randn(5, 6), randn(5, 6)
    for x in (randn(5, 2, 6), randn(5, 6, 8).transpose(1, 2), randn(5, 6)):
        view = (5, *(1,) * (x.dim() - 2), 6)
        for backend in ("native", "auto"):
            with select.backend(backend):
                close(layer(x, weight=weight, bias=bias), bare(x) * weight.view(view) + bias.view(view))


@pytest.mark.parametrize("name", ["batch 2d", "group", "instance"])
def test_with_a_mask(name):
    row = ROWS[name]
    layer, _ = made(row)
    plain, _ = made(row)
    for part in ("weight", "bias"):
        if getattr(plain, part) is not None:
            nn.init.constant_(getattr(plain, part), 1.0 if part == "weight" else 0.0)
    plain.load_state_dict({**layer.state_dict(), **dict(plain.named_parameters())})
    x, (weight, bias), mask = input_of(row), of_examples(row), torch.rand(7, 5, 4) < 0.7
    wanted = plain(x, mask=mask) * weight.view(row.view) + bias.view(row.view)
    agree(layer(x, mask=mask, weight=weight, bias=bias), wanted, (x, weight, bias))


@pytest.mark.parametrize("name", thinned(["batch 2d", "group", "layer"], ["group"].__contains__))
def test_compiled(name):
    row = ROWS[name]
    layer, _ = made(row, "relu")
    layer.eval()
    x, (weight, bias) = input_of(row), of_examples(row)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    agree(compiled(x, weight=weight, bias=bias), layer(x, weight=weight, bias=bias), (x, weight, bias))


@rows
def test_a_shape_that_does_not_fit_is_refused_and_nothing_moves(row):
    layer, _ = made(row)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    x = input_of(row)
    for bad in ((row.shape[0] + 1, *row.features), (row.shape[0], *row.features[:-1], 5), (2, 3, *row.features)):
        with pytest.raises(nk.ShapeError, match=r"for each of this batch; got|one value per|needs a weight"):
            layer(x, weight=randn(*bad))
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_a_batch_that_is_not_finite_is_refused_as_always():
    layer = nk.BatchNorm2d(6, nonfinite="raise")
    before = layer.running_mean.clone()
    x = torch.randn(MAPS)
    x[0, 1] = torch.inf
    with pytest.raises(nk.NonFiniteError, match=r"channels \[1\]"):
        layer(x, weight=torch.randn(7, 6))
    assert torch.equal(layer.running_mean, before)
