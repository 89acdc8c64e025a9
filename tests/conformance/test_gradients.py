"""First, second and forward-mode derivatives agree with finite differences in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from support.cases import CASES as ALL
from support.depth import first_of_each, thinned

CASES = [case for case in ALL if not case.stops_gradient]
BY_CLASS = first_of_each(CASES, lambda case: case.name)


def test_every_layer_is_differentiated():
    assert {case.name for case in CASES} == {case.name for case in ALL}


def as_function(layer):
    """The layer as a pure function of its input and parameters, each call from the same state."""
    names = [name for name, _ in layer.named_parameters()]
    buffers = dict(layer.named_buffers())

    def run(x, *parameters):
        state = {name: b.clone() for name, b in buffers.items()} | dict(zip(names, parameters, strict=True))
        return functional_call(layer, state, (x,))

    return run, [p.detach().clone().requires_grad_() for p in layer.parameters()]


def small(case):
    return case.input(torch.float64, shape=tuple(min(n, 3) if d in case.free else n for d, n in enumerate(case.shape)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BY_CLASS, ids=str)
def test_gradcheck(case, training):
    run, parameters = as_function(case.layer(torch.float64, training))
    assert gradcheck(run, (small(case).requires_grad_(), *parameters), check_forward_ad=True, fast_mode=True)


@pytest.mark.deep
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_of_every_element(case, training):
    run, parameters = as_function(case.layer(torch.float64, training))
    assert gradcheck(run, (small(case).requires_grad_(), *parameters))


@pytest.mark.parametrize("training", thinned([True, False], bool), ids=["train", "eval"])
@pytest.mark.parametrize("case", BY_CLASS, ids=str)
def test_gradgradcheck(case, training):
    run, parameters = as_function(case.layer(torch.float64, training))
    assert gradgradcheck(run, (small(case).requires_grad_(), *parameters), fast_mode=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_only_where_asked(case):
    layer = case.layer().requires_grad_(False)
    x = case.input().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in layer.parameters())
