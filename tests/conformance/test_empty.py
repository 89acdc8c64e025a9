"""Batches of no examples and maps of no positions: an empty output, gradients of zero, statistics as they were."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels import select
from support.cases import CASES
from support.depth import thinned

BATCH = [case for case in CASES if isinstance(case.build(), nn.modules.batchnorm._BatchNorm)]
WITHIN = [case for case in CASES if case.name in ("LayerNorm", "RMSNorm", "GroupNorm") or "InstanceNorm" in case.name]
BACKENDS = ["auto", "native", "reference"]


def emptied(case):
    """Inputs like the case's, with nothing left along one of the dimensions that any input may have of any size."""
    for dim in case.free:
        yield case.input().narrow(dim, 0, 0)


def step(layer, x):
    """Return the output of a call, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    layer.zero_grad()
    if y.requires_grad:
        y.sum().backward()
    return y, x.grad, [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_in_training(case, backend):
    for x in emptied(case):
        layer = case.layer()
        before = copy.deepcopy(layer.state_dict())
        with select.backend(backend):
            y, dx, gradients = step(layer, x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert dx is not None
        assert dx.shape == x.shape
        assert all(g is not None and not g.any() for g in gradients)
        for name, t in layer.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(t, before[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", [case for case in BATCH if case.twin is not None], ids=str)
def test_as_torch_leaves_it(case, training):
    for x in emptied(case):
        layer = case.layer(training=training)
        twin = case.torch_layer(layer)
        y, dx, gradients = step(layer, x)
        z, dz, theirs = step(twin, x)
        assert y.shape == z.shape
        assert dx.shape == dz.shape
        for g, h in zip(gradients, theirs, strict=True):
            assert g.equal(h)
        for name, t in twin.state_dict().items():
            assert layer.state_dict()[name].equal(t), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WITHIN, ids=str)
def test_within_examples(case, backend):
    for x in emptied(case):
        layer = case.layer()
        before = copy.deepcopy(layer.state_dict())
        with select.backend(backend):
            y, dx, gradients = step(layer, x)
        assert y.shape == dx.shape == x.shape
        assert all(g is not None and not g.any() for g in gradients)
        for name, t in layer.state_dict().items():
            assert t.equal(before[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_what_comes_with_nothing_gets_a_gradient_too(case, backend):
    x = case.input()[:0]
    residual = torch.zeros_like(x).requires_grad_()
    mask = torch.ones(0, *x.shape[2:], dtype=torch.bool)
    with select.backend(backend):
        y = case.layer()(x, residual=residual, mask=mask)
    y.sum().backward()
    assert residual.grad.shape == x.shape


@pytest.mark.parametrize(
    "case",
    thinned([case for case in BATCH if not case.option], lambda case: case.name == "BatchNorm2d"),
    ids=str,
)
def test_compiled(case):
    torch.compiler.reset()
    layer, x = case.layer(), case.input()[:0]
    y, dx, gradients = step(torch.compile(layer, fullgraph=True, backend="aot_eager"), x)
    assert y.shape == dx.shape == x.shape
    assert all(g is not None and not g.any() for g in gradients)


@pytest.mark.parametrize(
    "layer",
    thinned(
        [nk.LayerNorm(3), nk.RMSNorm(3), nk.GroupNorm(2, 4), nk.InstanceNorm1d(4), nk.BatchNorm1d(4).eval()],
        lambda layer: isinstance(layer, nk.LayerNorm),
    ),
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.deep
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_for_examples_that_only_the_data_numbers(layer):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x[x[:, 0, 0] > 0]), fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 4, 3).abs()
    torch.testing.assert_close(compiled(x), layer(x))
    assert compiled(-x).shape == (0, 4, 3)


@pytest.mark.parametrize("training", [True, False])
def test_functions(training):
    mean, var = torch.full((3,), 0.5), torch.full((3,), 2.0)
    y = nk.functional.batch_norm(torch.randn(0, 3, 4), mean, var, training=training)
    assert y.shape == (0, 3, 4)
    assert mean.equal(torch.full((3,), 0.5))
    assert var.equal(torch.full((3,), 2.0))
    assert nk.functional.batch_norm(torch.randn(2, 3, 0), None, None, training=True).shape == (2, 3, 0)
    assert nk.functional.group_norm(torch.randn(2, 4, 0), 2).shape == (2, 4, 0)
    assert nk.functional.instance_norm(torch.randn(2, 4, 0), mean.new_zeros(4), var.new_ones(4)).shape == (2, 4, 0)
    assert nk.functional.layer_norm(torch.randn(2, 0), [0]).shape == (2, 0)


def test_the_pure_function_counts_the_batch_and_moves_nothing():
    stored = nk.Moments(torch.randn(3), torch.rand(3), torch.tensor(4))
    y, after = nk.functional.batch_norm_update(torch.randn(0, 3), stored)
    assert y.shape == (0, 3)
    assert after.mean.equal(stored.mean)
    assert after.var.equal(stored.var)
    assert after.count == 5


def test_accumulated_with_an_empty_micro_batch_stores_the_others():
    layer, expected = (nk.AccumulatedBatchNorm2d(3, micro_batches=n) for n in (3, 2))
    first, last = torch.randn(2, 4, 3, 5, 5)
    for x in (first, first[:0], last):
        layer(x)
    for x in (first, last):
        expected(x)
    torch.testing.assert_close(layer.running_mean, expected.running_mean)
    torch.testing.assert_close(layer.running_var, expected.running_var)
    for _ in range(3):
        layer(first[:0])
    torch.testing.assert_close(layer.running_var, expected.running_var)
