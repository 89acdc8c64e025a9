"""Copies between layouts: by the loops where positions and channels change places, by torch elsewhere; equal bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normkit as nk
from normkit.kernels import core, native, select
from support import instruction_sets
from support.case import randomize_

pytestmark = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))

# Blocks of eight and what is left of them, in both directions; tasks of 32 columns; several dimensions of positions.
SHAPES = [(1, 8, 8), (3, 5, 7), (2, 16, 40), (2, 17, 65), (4, 9, 3, 13), (2, 3, 4, 5, 6), (5, 1, 33), (5, 33, 1)]


@pytest.fixture(params=instruction_sets.runnable())
def turns(request, monkeypatch):
    """The calls of the loops, with every instruction set and at any size."""
    before, found = core.instruction_set(), []
    core.use_instruction_set(request.param)
    monkeypatch.setattr(native, "WORTH_TURNING", 0)
    run = native.loops.turn_over
    monkeypatch.setattr(native.loops, "turn_over", lambda *arguments: (found.append(arguments[2:]), run(*arguments)))
    yield found
    core.use_instruction_set(before)


def moved(x, dim):
    """The same shape, with another dimension last in memory, and memory around it that must stay as it is."""
    last = x.dim() - 1 if dim == 1 else 1
    sizes = x.movedim(dim, last).shape
    memory = torch.full((x.numel() + 64,), 7.0, dtype=x.dtype)
    return memory[32:-32].view(sizes).movedim(last, dim), memory


@pytest.mark.parametrize("dim", [1, -1], ids=["channels second", "channels last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways(shape, dim, turns):
    x = torch.randn(shape)
    target, memory = moved(x, dim)
    assert torch.equal(native.copied(x, target), x)
    back = torch.full((x.numel() + 64,), 7.0)
    assert torch.equal(native.copied(target, back[32:-32].view(shape)), x)
    for each in (memory, back):
        assert (each[:32] == 7).all()
        assert (each[-32:] == 7).all()
    if not target.is_contiguous():
        (there, back) = turns
        assert there == (back[0], back[2], back[1])


@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, -1]), st.integers(0, 3))
def test_any_size_from_any_address(examples, one, other, dim, offset):
    x = torch.randn(examples * one * other + offset)[offset:].view(examples, one, other)
    target, _ = moved(x, dim)
    before, native.WORTH_TURNING = native.WORTH_TURNING, 0
    try:
        assert torch.equal(native.copied(x, target), x)
    finally:
        native.WORTH_TURNING = before


def others():
    """Copies that are no such turns."""
    x = torch.randn(4, 6, 5, 8)
    yield "sliced", x[:, ::2], torch.empty(4, 3, 5, 8)
    yield "neither contiguous", x.transpose(2, 3), torch.empty(6, 4, 8, 5).transpose(0, 1)
    yield "another type", x, torch.empty(4, 5, 8, 6, dtype=torch.float64).movedim(-1, 1)
    yield "half", x.half(), torch.empty(4, 5, 8, 6, dtype=torch.float16).movedim(-1, 1)
    yield "rank 2", x[0, 0], torch.empty(8, 5).t()
    yield "expanded", torch.randn(4, 6, 1, 1).expand(4, 6, 5, 8), torch.empty(4, 5, 8, 6).movedim(-1, 1)


@pytest.mark.parametrize(("name", "source", "target"), [*others()], ids=lambda v: v if isinstance(v, str) else "")
def test_other_copies_are_torchs(name, source, target, turns):
    torch.testing.assert_close(native.copied(source, target), source.to(target.dtype), rtol=0, atol=0)
    assert not turns


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1, 2, 2), (1, 0, 1, 2, 2), (1, 1, -1, 2, 2), (1, 1, 1, 0, 2), (1, 1, 1, 2, 0)]
)
def test_what_cannot_be_turned_is_refused(arguments):
    with pytest.raises(ValueError, match="at least one row"):
        native.loops.turn_over(*arguments)


def test_layers_turn_what_they_read_in_another_layout(turns):
    """The input of a norm of channels, and a gradient that comes in another layout than the input."""
    layer, x = randomize_(nk.LayerNorm2d(24)), torch.randn(3, 24, 9, 5, requires_grad=True)
    y = layer(x)
    assert turns == [(3, 24, 45)]
    y.backward(torch.randn(3, 24, 9, 5))
    assert turns == [(3, 24, 45)] * 2
    expected = torch.nn.functional.layer_norm(x.movedim(1, -1), (24,), layer.weight, layer.bias, 1e-6).movedim(-1, 1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_loops_turn_what_others_were_asked_for(turns, backend):
    layers = (nk.LayerNorm2d(24), nk.LayerNorm(24))
    inputs = (torch.randn(3, 24, 9, 5), torch.randn(3, 24, 9, 5).movedim(1, -1))
    with select.backend(backend):
        for layer, x in zip(layers, inputs, strict=True):
            layer(x.requires_grad_()).sum().backward()
    assert turns == []


@pytest.mark.parametrize("layer", [nk.BatchNorm2d(6), nk.InstanceNorm2d(6)], ids=lambda layer: type(layer).__name__)
def test_an_output_in_the_layout_that_is_wanted_is_not_copied_again(layer):
    """Of a part of larger maps, whose strides no output has."""
    x = torch.randn(4, 12, 9, 5)[:, ::2]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, select.backend("native"):
        y = layer(x)
    assert y.stride() == torch.empty_like(x).stride()
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::copy_") == 1


def test_second_derivatives_and_transforms_of_turned_maps(turns):
    layer = randomize_(nk.LayerNorm2d(5)).double()
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, x)
    inputs = torch.randn(3, 2, 5, 3, 4)
    single = layer.float()
    found = torch.func.vmap(single)(inputs)
    torch.testing.assert_close(found, torch.stack([single(one) for one in inputs]), rtol=1e-5, atol=1e-5)
