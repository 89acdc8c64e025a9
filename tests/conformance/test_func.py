"""torch.func over each layer made pure: gradients per example set, maps, and forward mode agree with plain loops."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from support.cases import CASES


def pure(layer):
    """The layer's output as a function of (state, x); the buffers it writes to are its own copies."""

    def run(parameters, x):
        buffers = {name: b.clone() for name, b in layer.named_buffers()}
        return functional_call(layer, (parameters, buffers), (x,))

    return run


def parameters_of(layer):
    return {name: p.detach() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grad_equals_backward(case):
    layer, x = case.layer(torch.float64), case.input(torch.float64)
    run, parameters = pure(layer), parameters_of(layer)
    weights = torch.randn_like(x)
    found, found_x = grad(lambda p, x: (run(p, x) * weights).sum(), argnums=(0, 1))(parameters, x)
    twin, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
    (twin(leaf) * weights).sum().backward()
    torch.testing.assert_close(found_x, leaf.grad, rtol=1e-12, atol=1e-12)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap_over_models_equals_a_loop(case):
    """An ensemble: parameters and inputs stacked, each model with statistics of its own (evaluation and gradient)."""
    layers = [case.layer(torch.float64, training=False) for _ in range(3)]
    xs = torch.stack([case.input(torch.float64) for _ in layers])
    state = {name: torch.stack([m.state_dict()[name] for m in layers]) for name in layers[0].state_dict()}
    run = vmap(lambda s, x: functional_call(layers[0], s, (x,)))
    expected = torch.stack([m(x) for m, x in zip(layers, xs, strict=True)])
    torch.testing.assert_close(run(state, xs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_agrees_with_the_gradient(case):
    layer, x = case.layer(torch.float64), case.input(torch.float64)
    run, parameters = pure(layer), parameters_of(layer)
    direction, weights = torch.randn_like(x), torch.randn_like(x)
    _, forward = jvp(lambda x: (run(parameters, x) * weights).sum(), (x,), (direction,))
    backward = grad(lambda x: (run(parameters, x) * weights).sum())(x)
    torch.testing.assert_close(forward, (backward * direction).sum(), rtol=1e-10, atol=1e-10)
