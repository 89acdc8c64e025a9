"""Calls without options take a fast path, which gives what the general path gives."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import normkit as nk
from normkit.kernels import core, select
from support.bounds import bound_of_any
from support.case import randomize_

pytestmark = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))

LAYERS = {
    "batch": lambda: nk.BatchNorm2d(6, activation="relu"),
    "group": lambda: nk.GroupNorm(3, 6, activation="leaky_relu"),
    "instance": lambda: nk.InstanceNorm2d(6, affine=True),
    "layer": lambda: nk.LayerNorm((6, 5, 4), activation="relu"),
    "rms": lambda: nk.RMSNorm((6, 5, 4)),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    layer = LAYERS[request.param]()
    randomize_(layer)
    return layer


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def x(request):
    return torch.randn(3, 6, 5, 4).contiguous(memory_format=request.param).requires_grad_()


def test_a_call_without_options_takes_the_fast_path(layer, x, monkeypatch):
    def general(*args, **kwargs):
        raise AssertionError("this is the general path")

    monkeypatch.setattr(type(layer), "_compute", general)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_it_gives_what_the_reference_gives(layer, x, mode):
    getattr(layer, mode)()
    dy = torch.randn_like(x)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    found = {}
    for backend in ("auto", "reference"):
        layer.load_state_dict(state)
        with select.backend(backend):
            y = layer(x)
            grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        found[backend] = [y.detach(), *grads, *(t.clone() for t in layer.state_dict().values())]
    walked = dy.square().sum((0, 2, 3)).sqrt()  # by the sums of a channel's gradient
    for one, other in zip(found["auto"], found["reference"], strict=True):
        allowed = bound_of_any("dx", other, walked).allowed(torch.float32).item()
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def test_it_can_be_differentiated_twice(layer, x):
    found = {}
    for backend in ("auto", "reference"):
        with select.backend(backend):
            # Not the plain sum of squares, which hardly depends on x: all of its terms would cancel.
            loss = (layer(x) * x.detach().sin()).square().sum()
            dx, dweight = torch.autograd.grad(loss, [x, layer.weight], create_graph=True)
            found[backend] = torch.autograd.grad(dx.square().sum() + dweight.square().sum(), [x, layer.weight])
    for one, other in zip(found["auto"], found["reference"], strict=True):
        most = other.abs().max().item()  # terms of this size cancel
        torch.testing.assert_close(one, other, rtol=0, atol=32 * torch.finfo(torch.float32).eps * most)


class Doubled(nn.Module):
    def forward(self, t):
        return 2 * t


def test_a_parametrized_parameter_is_not_overlooked(layer, x):
    plain = layer(x).detach().clone()
    for name in [name for name, _ in layer.named_parameters()]:
        parametrize.register_parametrization(layer, name, Doubled())
        found = {}
        for backend in ("auto", "reference"):
            with select.backend(backend):
                found[backend] = layer(x).detach()
        assert not torch.equal(found["auto"], plain), name
        torch.testing.assert_close(found["auto"], found["reference"], rtol=1e-6, atol=1e-6)
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)


def test_a_counter_of_another_type_is_not_written_beyond_its_end():
    layer, memory = nk.BatchNorm1d(3), torch.zeros(2, dtype=torch.int32)
    memory[:] = torch.tensor([-1, 77])  # counted as one long number, it would carry
    layer.num_batches_tracked = memory[0]
    for _ in range(3):
        layer(torch.randn(5, 3))
    assert memory.tolist() == [2, 77]


def test_a_subclass_that_computes_otherwise_is_asked(layer, x):
    class Other(type(layer)):
        def _compute(self, input, **kwargs):
            return input + 1

    layer.__class__ = Other
    assert torch.equal(layer(x), x + 1)


BATCH_PARTS = ("_compute", "_normalize_batch", "_update_", "_tensors", "_features", "_ranks_of")
PARTS = {"batch": BATCH_PARTS, "instance": ("_compute", "_of_batch")}


def overriding(cls, method, called):
    """A subclass in which a mixin overrides the method, and notes its calls."""

    class Mixin:
        def __getattribute__(self, name):
            if name == method:
                called.append(name)
            return super().__getattribute__(name)

    return type("Other", (Mixin, cls), {})


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_subclass_is_asked_for_every_part_of_the_arithmetic(name, part):
    called, layer = [], LAYERS[name]()
    layer.__class__ = overriding(type(layer), part, called)
    layer(torch.randn(3, 6, 5, 4))
    assert called


def test_a_subclass_that_changes_nothing_computes_the_same(layer, x):
    layer.eval()
    expected = layer(x)
    layer.__class__ = type("Same", (type(layer),), {})
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_the_fast_path_is_not_inherited(layer):
    assert type(layer)._has_fast_path
    assert not type("Other", (type(layer),), {})._has_fast_path


@pytest.mark.parametrize(
    "wrong",
    [torch.randn(3, 7, 5, 4), torch.randn(3), torch.randn(3, 6, 5, 4).long()],
    ids=["channels", "rank", "type"],
)
def test_what_is_wrong_is_still_said(layer, wrong):
    with pytest.raises(nk.NormkitError):
        layer(wrong)
