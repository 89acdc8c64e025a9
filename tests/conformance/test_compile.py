"""torch.compile takes each layer whole, in training and in evaluation, and changes nothing."""

import copy

import pytest
import torch

from normkit.kernels import select
from support.backends import refuses_loops
from support.cases import CASES

# The default backend on one row per class; on the others, what comes before it: capture and differentiation.
CLASSES = {case.name: str(case) for case in reversed(CASES)}

# Of the first, the ordinary run takes an operator of ours, and plain torch with a value that is held.
MECHANISMS = {"BatchNorm2d", "EvoNormB0"}


def rows():
    seen = set()
    for case in CASES:
        for training, mode in ((True, "train"), (False, "eval")):
            backend = "inductor" if CLASSES[case.name] == str(case) else "aot_eager"
            family = case.name.rstrip("123d")  # of one code for all ranks
            is_first = backend == "aot_eager" and family not in seen
            seen |= {family} if is_first else set()
            is_ordinary = training and (is_first or (backend == "inductor" and str(case) in MECHANISMS))
            marks = () if is_ordinary else pytest.mark.deep
            yield pytest.param(case, training, backend, id=f"{case}-{mode}-{backend}", marks=marks)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch.compiler.reset()


def test_every_mechanism_is_a_row_of_a_class():
    assert set(CLASSES.values()) >= MECHANISMS


@pytest.mark.parametrize(("case", "training", "backend"), list(rows()))
def test_fullgraph(case, training, backend):
    layer = case.layer(training=training)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        x = case.input().requires_grad_()
        twin_x = x.detach().clone().requires_grad_()
        # What the loops do not take is compiled from the reference's operators.
        same = "reference" if refuses_loops(twin, twin_x) else "auto"
        y = compiled(x)
        with select.backend(same):
            z = twin(twin_x)
        dy = torch.randn_like(y)
        y.backward(dy)
        z.backward(dy)
        torch.testing.assert_close(y, z, rtol=2e-7, atol=1e-7 + case.slack(z))
        torch.testing.assert_close(x.grad, twin_x.grad, rtol=2e-7, atol=1e-7 + case.slack(twin_x.grad))
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-7, atol=1e-6 + case.slack(q.grad))
    for name, b in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b, rtol=1e-7, atol=1e-8)
