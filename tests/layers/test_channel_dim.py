"""BatchNorm with its channels in another dimension: as if they were moved there and back, in every way to run it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels import select
from support.case import randomize_
from support.depth import thinned
from support.refusal import refused, refused_untouched

DOUBLE = torch.float64
SHAPES = {nk.BatchNorm1d: (4, 6, 5), nk.BatchNorm2d: (4, 3, 6, 5), nk.BatchNorm3d: (3, 2, 4, 6, 5)}
TORCHS = {nk.BatchNorm1d: nn.BatchNorm1d, nk.BatchNorm2d: nn.BatchNorm2d, nk.BatchNorm3d: nn.BatchNorm3d}
PLACES = [(cls, dim) for cls, shape in SHAPES.items() for dim in range(1 - len(shape), len(shape)) if dim != 0]


def pair(cls, dim, training=True, dtype=DOUBLE, **options):
    """A layer of ours in random state, torch's in the same, and an input."""
    shape = SHAPES[cls]
    ours = randomize_(cls(shape[dim], eps=0.01, momentum=0.3, dim=dim, dtype=dtype, **options)).train(training)
    theirs = TORCHS[cls](shape[dim], eps=0.01, momentum=0.3, dtype=dtype).train(training)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, torch.randn(shape, dtype=dtype) * 2 + 0.3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("cls", "dim"), PLACES)
def test_as_torchs_with_the_channels_moved_there_and_back(cls, dim, training):
    ours, theirs, x = pair(cls, dim, training)
    for _ in range(2):
        leaf = (x * torch.rand(())).requires_grad_()
        y, z = ours(leaf), theirs(leaf.movedim(dim, 1)).movedim(1, dim)
        dy = torch.randn_like(leaf)
        found, expected = (
            torch.autograd.grad(out, [leaf, *layer.parameters()], dy) for out, layer in ((y, ours), (z, theirs))
        )
        torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-11)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_every_backend(backend):
    ours, theirs, x = pair(nk.BatchNorm2d, -1, dtype=torch.float32)
    with select.backend(backend):
        y = ours(x)
    torch.testing.assert_close(y, theirs(x.movedim(-1, 1)).movedim(1, -1), rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()


def test_channels_last_in_memory_are_not_copied():
    layer, x = nk.BatchNorm1d(16, dim=-1), torch.randn(4, 20, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        layer(x)
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("with_channels", [False, True], ids=["positions", "with a dimension of one"])
@pytest.mark.parametrize("dim", [2, -1])
def test_mask_residual_and_activation(dim, with_channels):
    ours, _, x = pair(nk.BatchNorm1d, dim, activation="silu")
    plain = randomize_(nk.BatchNorm1d(5, eps=0.01, momentum=0.3, dtype=DOUBLE, activation="silu"))
    plain.load_state_dict(ours.state_dict())
    mask, r = torch.rand(x.shape[:2]) > 0.3, torch.randn_like(x)
    before = ours.running_mean.clone()
    y = ours(x, residual=r, mask=mask.unsqueeze(-1) if with_channels else mask)
    z = plain(x.movedim(dim, 1), residual=r.movedim(dim, 1), mask=mask).movedim(1, dim)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.running_mean, 0.7 * before + 0.3 * x[mask].mean(0), rtol=1e-11, atol=1e-11)


def test_an_activation_with_a_parameter_per_channel():
    layer = randomize_(nk.BatchNorm1d(5, dim=-1, activation=nn.PReLU(5), dtype=DOUBLE)).double()
    plain = copy.deepcopy(layer)
    del plain.dim
    x = torch.randn(4, 6, 5, dtype=DOUBLE)
    torch.testing.assert_close(layer(x), plain(x.movedim(-1, 1)).movedim(1, -1), rtol=1e-12, atol=1e-12)


def test_rows_have_their_channels_last_anyway():
    ours, theirs = nk.BatchNorm1d(5, dim=-1), nk.BatchNorm1d(5)
    x = torch.randn(8, 5)
    assert torch.equal(ours(x), theirs(x))


def test_second_derivatives_and_forward_mode():
    layer = randomize_(nk.BatchNorm1d(3, dim=-1, dtype=DOUBLE, track_running_stats=False))
    x = torch.randn(3, 2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_in_place():
    layer, twin = (nk.BatchNorm1d(5, dim=-1, inplace=inplace) for inplace in (True, False))
    leaves = [torch.randn(4, 6, 5).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    dy, outputs = torch.randn(4, 6, 5), []
    for norm, leaf in zip((layer, twin), leaves, strict=True):
        given = leaf * 1
        outputs.append(norm(given))
        if norm is layer:
            assert outputs[0].data_ptr() == given.data_ptr()
        outputs[-1].backward(dy)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", thinned([True, False], lambda training: not training), ids=["train", "eval"])
def test_compiled_exported_and_traced(training):
    torch.compiler.reset()
    layer, _, x = pair(nk.BatchNorm1d, -1, training, torch.float32, activation="relu")
    runs = {
        "compiled": torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager"),
        "exported": torch.export.export(copy.deepcopy(layer), (x,)).module(),
        "traced": torch.fx.symbolic_trace(nn.Sequential(copy.deepcopy(layer))),
    }
    for name, run in runs.items():
        torch.testing.assert_close(run(x), copy.deepcopy(layer)(x), rtol=1e-5, atol=1e-5, msg=name)
    nodes = [str(node.target) for node in runs["exported"].graph.nodes]
    assert any("batch_norm" in target for target in nodes)
    calls = [node.op for node in runs["traced"].graph.nodes]
    assert calls == ["placeholder", "call_module", "output"]  # the call whole, and nothing moved around it
    torch.compiler.reset()


def test_copies_and_layers_pickled_before_the_option():
    layer = randomize_(nk.BatchNorm1d(5, dim=-1)).eval()
    x = torch.randn(4, 6, 5)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert twin.dim == -1
    assert "dim" not in vars(nk.BatchNorm1d(5))
    assert nk.BatchNorm1d(5).dim == 1


def test_what_is_printed():
    assert repr(nk.BatchNorm2d(5, dim=-1)).endswith("dim=-1)")
    assert "dim" not in repr(nk.BatchNorm2d(5))


@pytest.mark.parametrize("dim", [0, 3, -3, True, 1.5, None, "last"])
def test_a_dimension_that_is_none(dim):
    words = "dim must be that of the channels, from 1 to 2 or from -2 to -1"
    refused(lambda: nk.BatchNorm1d(5, dim=dim), "BatchNorm1d", words, f"got {dim!r}")


def test_bad_input_is_named_as_it_came():
    layer = randomize_(nk.BatchNorm1d(5, dim=-1))
    who = "BatchNorm1d(5, dim=-1) needs (N, 5) or (N, L, 5); got"
    refused_untouched(layer, lambda: layer(torch.randn(4, 5, 6)), f"{who} (4, 5, 6)", "Leave dim= out")
    refused_untouched(layer, lambda: layer(torch.randn(4, 6, 7)), f"{who} (4, 6, 7)", "number of channels")
    refused_untouched(layer, lambda: layer(torch.randn(5)), f"{who} (5,)", "unsqueeze")
    refused_untouched(layer, lambda: layer(torch.ones(4, 6, 5).long()), "floating point")
    x = torch.randn(4, 6, 5)
    refused_untouched(layer, lambda: layer(x, residual=x.movedim(-1, 1)), "residual", "(4, 6, 5)", "got (4, 5, 6)")
    refused_untouched(layer, lambda: layer(x, mask=torch.ones(4, 5) > 0), "a mask of shape (4, 6)", "got (4, 5)")
    refused_untouched(layer, lambda: layer(x, mask=torch.ones(4, 1, 6) > 0), "a mask of shape (4, 6)")
    refused_untouched(layer, lambda: layer(x[:1, :1]), "more than 1 value per channel")
    both = nk.BatchNorm1d(5, dim=2)
    refused(lambda: both(torch.randn(4, 5)), "BatchNorm1d(5, dim=2) needs (N, L, 5); got (4, 5)")
    refused(lambda: nk.BatchNorm2d(3)(torch.randn(2, 8, 8, 3)), "dim=-1")


@pytest.mark.parametrize("cls", [nk.SyncBatchNorm, nk.GhostBatchNorm1d, nk.BatchRenorm1d, nk.FrozenBatchNorm1d])
def test_relatives_have_no_such_option(cls):
    with pytest.raises(TypeError, match="dim"):
        cls(5, dim=-1)
