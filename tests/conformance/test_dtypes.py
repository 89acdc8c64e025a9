"""Each floating type in, the same type out; statistics never in less than float32."""

import copy

import pytest
import torch

from normkit.kernels import select
from support.cases import CASES, taking_part
from support.depth import thinned
from support.rounding import FLOAT

# Outputs in the two long types are in test_formula.py, too, and gradients in test_gradients.py.
DTYPES = thinned([torch.float64, torch.float32, torch.bfloat16, torch.float16], lambda dtype: dtype is torch.float16)
HALF = thinned([torch.bfloat16, torch.float16], lambda dtype: dtype is torch.bfloat16)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_type_is_kept_and_by_the_reference_rounded_once(case, dtype, training):
    layer = case.layer(dtype, training)
    exact = case.build().double().train(training)
    exact.load_state_dict(layer.state_dict())
    x = case.input(dtype).requires_grad_()
    with select.backend("reference"):
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    wide = x.detach().double().requires_grad_()
    with select.backend("reference"):
        z = exact(wide)
        z.backward(dy.double())
    assert y.dtype == x.grad.dtype == dtype
    assert {p.grad.dtype for p in taking_part(layer).values()} <= {dtype}
    half_ulp = 0.505 * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 1e-12
    in_float = FLOAT if dtype.itemsize == 2 else 0.0  # half precision is applied in float: terms that cancel show it
    for found, exact in ((y, z), (x.grad, wide.grad)):
        atol = tiny + case.slack(exact, dtype) + in_float * exact.abs().max().item()
        torch.testing.assert_close(found.double(), exact, rtol=half_ulp, atol=atol)


@pytest.mark.parametrize("dtype", HALF, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_input_with_float32_state(case, dtype):
    """What autocast hands a layer: half precision activations, float32 parameters and buffers."""
    layer = case.layer(torch.float32)
    x = case.input(dtype).requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert all(b.dtype == torch.float32 for b in layer.buffers() if b.is_floating_point())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_half_values_do_not_overflow(case):
    """Squares and sums of float16 values leave its range at once: they must never be taken in it."""
    layer = case.layer(torch.float32)
    x = (case.input(torch.float32) * 2e4).clamp(-6e4, 6e4).half()
    exact = copy.deepcopy(layer).double()
    most = torch.finfo(torch.half).max
    too_large = exact(x.double()).abs() > most  # where no statistics bound the output
    if getattr(exact, "activation", None) is not None:  # torch rounds to half before it activates
        exact.activation = None
        too_large |= exact(x.double()).abs() > most
    assert not too_large.all()
    assert (layer(x).isfinite() | too_large).all()
