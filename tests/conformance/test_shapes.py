"""Any size, stride, offset and storage: the result is that of the same values laid out plainly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normkit as nk
from support.cases import CASES
from support.depth import first_of_each


@st.composite
def laid_out(draw, case):
    """An input of the case, with free dimensions of any size, as a view of memory laid out in some other way."""
    shape = tuple(draw(st.integers(2, 6)) if d in case.free else n for d, n in enumerate(case.shape))
    plain = case.input(torch.float64, mean=draw(st.sampled_from([0.0, -3.0, 1e3])), shape=shape)
    order = draw(st.permutations(range(len(shape))))
    step, offset = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    # Every other value of a larger tensor, its dimensions in another order in memory.
    memory = torch.full([shape[d] for d in order] + [offset + step], 99.0, dtype=torch.float64)[..., offset]
    view = memory.permute([order.index(d) for d in range(len(shape))])
    view.copy_(plain)
    return plain, view


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", first_of_each(CASES, lambda case: case.name), ids=str)
@given(data=st.data())
def test_strides_change_nothing(case, training, data):
    plain, view = data.draw(laid_out(case))
    layer, other = case.layer(torch.float64, training), case.build().double().train(training)
    other.load_state_dict(layer.state_dict())
    plain.requires_grad_()
    twin = view.detach().requires_grad_()
    y, z = layer(plain), other(twin)
    dy = torch.randn_like(y, memory_format=torch.contiguous_format)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(z, y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(twin.grad, plain.grad, rtol=1e-10, atol=1e-11)
    for name, b in layer.named_buffers():
        torch.testing.assert_close(other.get_buffer(name), b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_shared_by_elements_is_read_as_if_each_had_its_own(case):
    layer, twin = case.layer(torch.float64), case.build().double()
    twin.load_state_dict(layer.state_dict())
    memory = torch.randn(sum(case.shape), dtype=torch.float64)
    shared = memory.as_strided(case.shape, [1] * len(case.shape))  # a value at every index that adds up to its place
    dy = torch.randn(1, dtype=torch.float64).expand(case.shape)
    y, z = layer(shared), twin(shared.clone())
    assert shared.untyped_storage().nbytes() < y.untyped_storage().nbytes()
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    if y.requires_grad:
        y.backward(dy)
        z.backward(dy.clone())
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def uses_stored(case):
    return nk.describe(case.build().eval()).uses == "stored"


@pytest.mark.parametrize("case", [case for case in CASES if uses_stored(case)], ids=str)
def test_an_empty_batch_in_evaluation_gives_an_empty_output(case):
    x = case.input()[:0]
    assert case.layer(training=False)(x).shape == x.shape
