"""Norms over the channels of each position: timm's spelling and function, both layouts, and what they refuse."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.kernels import select
from support.bounds import Step, bounds_of
from support.case import randomize_
from support.refusal import refused, refused_untouched

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CLASSES = [nk.LayerNorm2d, nk.RMSNorm2d]


def published(layer, x):
    """ConvNeXt's composition, and timm's eager operators for the root mean square, in float64."""
    x, weight = x.double(), layer.weight.double()
    if isinstance(layer, nk.RMSNorm2d):
        return x * (x.pow(2).mean(1, keepdim=True) + layer.eps).rsqrt() * weight[:, None, None]
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return weight[:, None, None] * ((x - u) / torch.sqrt(s + layer.eps)) + layer.bias.double()[:, None, None]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ["LayerNorm2d", "RMSNorm2d"])
def test_timms_layer_computes_the_same_and_has_the_same_state(name, layout):
    from support import aside  # noqa: F401  # where timm is

    timm = pytest.importorskip("timm.layers")
    theirs = randomize_(getattr(timm, name.replace("RMS", "Rms"))(6, 1e-3)).double()
    ours = getattr(nk, name)(6, 1e-3).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(theirs, nn.LayerNorm) == isinstance(ours, nn.LayerNorm)
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64).contiguous(memory_format=FORMATS[layout])
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    assert getattr(nk, name)(6).eps == getattr(timm, name.replace("RMS", "Rms"))(6).eps


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "hardswish"])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_published_composition_with_residual_and_activation(cls, layout, activation):
    layer = randomize_(cls(6, 1e-3, activation=activation)).double()
    x, r = (torch.randn(3, 6, 5, 4, dtype=torch.float64).contiguous(memory_format=FORMATS[layout]) for _ in range(2))
    leaves = [x.requires_grad_(), r.requires_grad_(), *layer.parameters()]
    y, z = layer(x, residual=r), published(layer, x) + r
    z = z if activation is None else getattr(F, activation)(z)
    dy = torch.randn_like(z)
    torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-11)
    found, expected = (torch.autograd.grad(out, leaves, dy) for out in (y, z))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_loops_keep_the_bound_in_both_layouts(cls, layout, dtype):
    layer = randomize_(cls(24)).to(dtype)
    x, dy = (torch.randn(4, 24, 7, 9).to(dtype).contiguous(memory_format=FORMATS[layout]) for _ in range(2))
    weight = layer.weight.detach()[:, None, None]
    bias = None if cls is nk.RMSNorm2d else layer.bias.detach()[:, None, None]
    step = Step(x, (1,), layer.eps, weight, bias, centred=cls is nk.LayerNorm2d, dy=dy)
    bounds = bounds_of(step)
    x.requires_grad_()
    with select.backend("native"):
        y = layer(x)
    y.backward(dy)
    assert y.is_contiguous(memory_format=torch.channels_last)
    bounds["output"].check(y)
    bounds["dx"].check(x.grad)
    bounds["dweight"].check(layer.weight.grad, terms=dtype)


def test_no_copy_of_channels_that_lie_side_by_side():
    layer, x = nk.LayerNorm2d(16), torch.randn(2, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    rows = nk.LayerNorm(16, eps=1e-6)
    with torch.no_grad():
        assert torch.equal(layer(x).movedim(1, -1), rows(x.movedim(1, -1)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        layer(x)
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & {event.key for event in seen.key_averages()}


def test_a_residual_of_another_layout():
    layer, x = randomize_(nk.LayerNorm2d(6, activation="silu")), torch.randn(3, 6, 5, 4)
    r = torch.randn(3, 6, 5, 4)
    last = r.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x, residual=last), layer(x, residual=r), rtol=1e-6, atol=1e-6)


def test_float64_far_from_zero():
    layer = randomize_(nk.LayerNorm2d(8)).double()
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64) + 1e6
    # The mean is known to 1e-16 of its size.
    torch.testing.assert_close(layer(x), published(layer, x), rtol=0, atol=1e-8)


def test_one_channel_and_one_position():
    layer = randomize_(nk.LayerNorm2d(1))
    torch.testing.assert_close(layer(torch.randn(2, 1, 3, 3)), layer.bias.expand(2, 1, 3, 3).contiguous())
    layer = randomize_(nk.LayerNorm2d(5)).double()
    x = torch.randn(2, 5, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x), published(layer, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls", CLASSES)
def test_maps_without_positions_and_batches_without_examples(cls):
    layer = randomize_(cls(5))
    for shape in ((0, 5, 3, 3), (2, 5, 0, 3)):
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert all(not p.grad.any() for p in layer.parameters())


def test_the_machine_epsilon():
    layer, x = nk.RMSNorm2d(5, eps=None), torch.randn(2, 5, 3, 3) * 1e-4
    expected = F.rms_norm(x.movedim(1, -1), (5,), layer.weight).movedim(-1, 1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", CLASSES)
def test_bad_input(cls):
    name = cls.__name__
    refused(lambda: cls(0), f"{name} needs a number of channels, 1 or more; got 0")
    refused(lambda: cls(2.5), "got 2.5")
    refused(lambda: cls(4, eps=-1.0), "eps must be positive")
    refused(lambda: cls(4, activation="rely"), "Did you mean")
    layer = randomize_(cls(4))
    refused_untouched(layer, lambda: layer(torch.randn(2, 3, 5, 4)), f"{name}(4) needs (N, 4, H, W)", "movedim(-1, 1)")
    refused_untouched(layer, lambda: layer(torch.randn(2, 4, 5)), "got (2, 4, 5)")
    refused_untouched(layer, lambda: layer(torch.ones(2, 4, 3, 3).long()), "floating point")
    refused_untouched(layer, lambda: layer(torch.randn(2, 4, 3, 3), residual=torch.randn(2, 4, 1, 1)), "shortcut")


def test_a_layer_norm_that_gets_maps_names_these():
    refused(lambda: nk.LayerNorm(4)(torch.randn(2, 4, 5, 6)), "Use LayerNorm2d or RMSNorm2d")


def test_what_is_printed_and_copied():
    layer = randomize_(nk.LayerNorm2d(4, affine="shift", activation="relu"))
    assert repr(layer) == "LayerNorm2d(4, eps=1e-06, affine=shift, activation=relu)"
    assert repr(nk.RMSNorm2d(4, 1e-3, False)) == "RMSNorm2d(4, eps=0.001, affine=False)"
    assert layer.weight is None
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        x = torch.randn(2, 4, 3, 3)
        assert torch.equal(twin(x), layer(x))
    assert nk.LayerNorm2d(4, bias=False).bias is None
