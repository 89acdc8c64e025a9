"""Norms of other libraries are recognized by what they compute, and nothing else is touched by finding out."""

import dataclasses
import random
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import normkit as nk
from normkit.spec import computed
from support.case import randomize_
from support.look_alikes import LOOK_ALIKES, OTHERS, SIZE, Llama, OfFunction, Permuted, Weighted, WithActivation, rms

USUAL = nk.NormSpec(kind="rms", over=("C",), uses="batch", affine=True, eps=None, normalized_shape=(SIZE,), exact=False)
# A few operations in float32, each of which rounds to half a unit, on values up to the largest.
FLOAT32 = 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_recognized(name):
    case = LOOK_ALIKES[name]
    layer = randomize_(case.build(SIZE))
    spec = nk.describe(layer)
    assert spec == dataclasses.replace(USUAL, **case.says)
    assert nk.describe(layer.eval()) == spec


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_the_description_is_what_the_layer_computes(name):
    case = LOOK_ALIKES[name]
    layer = randomize_(case.build(SIZE))
    spec = nk.describe(layer)
    for scale in (1.0, (spec.eps or 1e-6) ** 0.5):
        x = scale * (torch.randn(case.shape) + 0.3)
        expected = computed(spec, layer, x)
        if spec.activation is not None:
            expected = layer.act(expected)
        with torch.no_grad():
            gap = (layer(x) - expected).abs().max()
        assert gap <= FLOAT32 * expected.abs().max()


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_something_else_is_not(name):
    assert nk.describe(OfFunction(SIZE, OTHERS[name])) is None


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 12, 20, 1024])
@pytest.mark.parametrize("build", [Llama, Permuted], ids=lambda build: build.__name__)
def test_of_any_size(build, size):
    spec = nk.describe(randomize_(build(size)))
    assert (spec.normalized_shape or (spec.num_features,)) == (size,)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-7, 2.5e-6, 1e-5, 1.234567e-4, 1e-2, 0.3])
def test_the_eps_is_found(eps):
    assert nk.describe(Llama(SIZE, eps)).eps == eps


def test_an_eps_that_is_nowhere_to_be_read():
    layer = OfFunction(SIZE, lambda norm, x: norm.weight * rms(x, 3.14159e-5))
    assert nk.describe(layer).eps == pytest.approx(3.14159e-5, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_other_types(dtype):
    assert nk.describe(Llama(SIZE).to(dtype)) == nk.describe(Llama(SIZE))


class Counting(Weighted):
    """It counts the runs of all layers of its class, and keeps the inputs of its own."""

    runs = 0

    def __init__(self, size, eps=1e-6):
        super().__init__(size, eps)
        self.inputs = []

    def forward(self, x):
        type(self).runs += 1
        self.inputs.append(x)
        self.last = x
        torch.rand(3), numpy.random.rand(3), random.random()
        return self.weight * rms(x, self.variance_epsilon)


class TestWithoutEffects:
    def test_on_the_layer(self):
        layer = randomize_(Counting(SIZE))
        layer.weight.grad = torch.ones(SIZE)
        before, version = layer.weight.clone(), layer.weight._version
        called = []
        layer.register_forward_hook(lambda *args: called.append("hook"))
        layer.register_forward_pre_hook(lambda *args: called.append("pre-hook"))
        assert nk.describe(layer).kind == "rms"
        assert (called, layer.inputs, hasattr(layer, "last"), layer.training) == ([], [], False, True)
        assert torch.equal(layer.weight, before)
        assert layer.weight._version == version
        assert torch.equal(layer.weight.grad, torch.ones(SIZE))

    def test_on_the_children(self):
        called = []
        layer = WithActivation(SIZE, nn.ReLU(inplace=True))
        layer.act.register_forward_hook(lambda *args: called.append("hook"))
        assert nk.describe(layer).activation == "relu"
        assert called == []

    def test_on_random_states(self):
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
        nk.describe(Counting(SIZE, 1e-4))
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (numpy.random.get_state()[1] == states[2]).all()

    def test_on_a_mode_that_watches_operators(self):
        class Watching(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen += 1
                return func(*args, **(kwargs or {}))

        layer = Counting(SIZE, 2e-4)
        with Watching() as watching:
            assert nk.describe(layer).eps == 2e-4
        assert watching.seen == 0

    def test_on_autocast_and_gradients(self):
        with torch.autocast("cpu", torch.bfloat16):
            assert nk.describe(Llama(SIZE, 2e-4)).eps == 2e-4
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()

    def test_on_warnings(self):
        def warned(norm, x):
            warnings.warn("once more", UserWarning, stacklevel=1)
            return norm.weight * rms(x, 1e-6)

        assert nk.describe(OfFunction(SIZE, warned)).kind == "rms"


class Plain(Weighted):
    """It counts the runs of all layers of its class."""

    runs = 0

    def forward(self, x):
        type(self).runs += 1
        return self.weight * rms(x, self.variance_epsilon)


def test_what_was_found_is_remembered():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(SIZE, SIZE), Plain(SIZE, 0.25)) for _ in range(300)])
    before = Plain.runs
    assert sum(nk.describe(layer) is not None for layer in model.modules()) == 300
    assert Plain.runs - before <= 3  # for gamma and beta, for eps, and in training
    assert nk.describe(Plain(SIZE, 0.5)).eps == 0.5
    assert nk.describe(Plain(SIZE + 1)).normalized_shape == (SIZE + 1,)
    assert Plain.runs - before <= 9


def test_a_forward_that_was_exchanged_is_tried_again(monkeypatch):
    assert nk.describe(Plain(SIZE)).kind == "rms"
    monkeypatch.setattr(Plain, "forward", lambda self, x: 2 * x)
    assert nk.describe(Plain(SIZE)) is None
    layer = Llama(SIZE)
    layer.forward = lambda x: x  # of one layer: what other code put there is not ours to run
    assert nk.describe(layer) is None


class MustNotRun(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        pytest.fail("it ran")


class MustNotRunNorm(MustNotRun):
    def forward(self, x, condition):
        pytest.fail("it ran")


def vector(size=SIZE, **options):
    return nn.Parameter(torch.ones(size, **options))


@pytest.mark.parametrize(
    "module",
    [
        MustNotRun(weight=vector(), project=nn.Linear(SIZE, SIZE)),
        MustNotRun(weight=nn.Parameter(torch.ones(SIZE, SIZE))),
        MustNotRun(weight=vector(), bias=vector(SIZE + 1)),
        MustNotRun(weight=vector(device="meta")),
        MustNotRun(weight=nn.UninitializedParameter()),
        MustNotRun(weight=vector(), scale=torch.ones(SIZE)),
        MustNotRun(weight=vector(), norm=nn.LayerNorm(SIZE, elementwise_affine=False)),
        MustNotRun(**{f"w{index}": vector() for index in range(5)}),
        MustNotRun(weight=vector(1)),
        MustNotRun(weight=vector(1 << 16)),
        MustNotRun(count=nn.Buffer(torch.tensor(3))),
        MustNotRun(size=SIZE),
        MustNotRunNorm(weight=vector()),
    ],
    ids=[
        *("holds a linear layer", "matrix", "two sizes", "meta", "lazy", "a tensor that other code computes"),
        *("holds a norm", "many vectors", "one value", "too large", "counts", "nothing hints at a norm", "two inputs"),
    ],
)
def test_what_cannot_be_a_norm_does_not_run(module):
    assert nk.describe(module) is None


def test_subclasses_that_cannot_be_tried_are_described_by_their_type():
    class Conditioned(nn.LayerNorm):
        def forward(self, x, condition):
            return super().forward(x) * condition

    for layer in (Conditioned(6), Permuted((5, 6)), Permuted(6, device="meta")):
        assert (nk.describe(layer).kind, nk.describe(layer).exact) == ("layer", False)
