"""In place, the output is all that is kept: the same numbers from half the memory, or the ordinary way."""

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels import core
from support.case import randomize_

pytestmark = pytest.mark.skipif(core.WHY_NOT is not None, reason="normkit was built without its C++ core")

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def pair(activation, **options):
    """A layer that works in place and one that does not, alike in everything else."""
    layers = []
    for inplace in (True, False):
        torch.manual_seed(3)
        layers.append(randomize_(nk.BatchNorm2d(6, activation=activation, inplace=inplace, **options)))
    return layers


def step(layer, x, dy):
    """The output and all gradients; the layer sees a tensor that is no leaf, as in a network."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(leaf * 1)
    return [y.detach().clone(), *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["planes", "rows"])
@pytest.mark.parametrize("activation", [None, "leaky_relu"])
@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
@pytest.mark.parametrize("shape", [(4, 6, 9, 9), (3, 6, 2, 2)], ids=str)
def test_the_same_numbers(layout, activation, affine, shape):
    x, dy = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
    layers = pair(activation, affine=affine)
    (y, *gradients), (expected, *ordinary) = (step(layer, x * 2 + 1, dy) for layer in layers)
    assert torch.equal(y, expected)
    for a, b in zip(gradients, ordinary, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for name, stored in layers[0].named_buffers():
        assert torch.equal(stored, layers[1].get_buffer(name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x, dy = (torch.randn(4, 6, 9, 9).to(dtype) for _ in range(2))
    layers = pair("leaky_relu")
    (y, *gradients), (expected, *ordinary) = (step(layer, x, dy) for layer in layers)
    assert torch.equal(y, expected)
    for a, b, allowed in zip(gradients, ordinary, what_rounding_costs(layers[1], x, dy), strict=True):
        assert ((a - b).abs() <= allowed).all()


def what_rounding_costs(layer, x, dy):
    """First-order errors of dx, dweight and dbias, when xhat is worked out from an output rounded to this type."""
    eps, over = torch.finfo(x.dtype).eps, (0, 2, 3)
    w, b = (p.detach().double().reshape(1, -1, 1, 1) for p in layer.parameters())
    var, mean = torch.var_mean(x.double(), over, keepdim=True, correction=0)
    inverse_std = (var + layer.eps).rsqrt()
    xhat = (x.double() - mean) * inverse_std
    z = w * xhat + b
    dz = dy.double() * torch.where(z > 0, 1.0, 0.01)
    e_xhat = eps * z.abs() / w.abs()  # a leaky ReLU keeps relative errors
    e_dweight = (dz.abs() * e_xhat).sum(over)
    shared = e_xhat * (dz * xhat).mean(over, keepdim=True).abs() + xhat.abs() * (dz.abs() * e_xhat).mean(over, True)
    g = dz - dz.mean(over, keepdim=True) - xhat * (dz * xhat).mean(over, keepdim=True)
    e_dx = inverse_std * w.abs() * (shared + eps * g.abs())
    tiny = 1e-6  # of the sums, which are taken in double and stored in float
    return e_dx + tiny, e_dweight + tiny * dz.abs().sum(over), tiny * dz.abs().sum(over)


def test_only_the_output_is_kept_and_it_is_the_input():
    x = torch.randn(8, 6, 14, 14, requires_grad=True) * 1
    memory, kept = x.data_ptr(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pair("leaky_relu")[0](x)
    assert y.data_ptr() == memory
    assert {t.data_ptr() for t in kept if t.numel() == x.numel()} == {memory}


def test_a_gamma_that_leaves_nothing_of_the_input_is_worked_on_the_ordinary_way():
    layer, twin = pair("leaky_relu")
    for each in (layer, twin):
        nn.init.constant_(each.weight[2], 0.0)
    x, dy = torch.randn(4, 6, 9, 9), torch.randn(4, 6, 9, 9)
    for a, b in zip(step(layer, x, dy), step(twin, x, dy), strict=True):
        assert torch.equal(a, b)


def test_a_residual_and_evaluation_leave_the_input_alone():
    layer, twin = pair("leaky_relu")
    x, residual = torch.randn(4, 6, 9, 9), torch.randn(4, 6, 9, 9)
    before = x.clone()
    assert torch.equal(layer(x, residual=residual), twin(before, residual=residual))
    assert torch.equal(layer.eval()(x), twin.eval()(before))
    assert torch.equal(x, before)


def test_what_another_operator_still_needs_is_not_lost_in_silence():
    x = torch.randn(4, 6, 9, 9, requires_grad=True)
    y = pair("leaky_relu")[0](x.exp())  # exp keeps its output for its own backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_leaf_is_refused():
    with pytest.raises(RuntimeError, match="leaf"):
        pair(None)[0](torch.randn(4, 6, 9, 9, requires_grad=True))


def test_a_second_derivative_is_refused():
    x = torch.randn(4, 6, 9, 9, requires_grad=True)
    y = pair("leaky_relu")[0](x * 1)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
def test_an_activation_that_cannot_be_undone_is_refused(activation):
    with pytest.raises(nk.ArgumentError, match=f'can be undone, "leaky_relu" or None; got "{activation}"'):
        nk.BatchNorm2d(3, activation=activation, inplace=True)
