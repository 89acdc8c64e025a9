"""torch.compile takes each layer whole, in training and in evaluation, and changes nothing."""

import copy

import pytest
import torch

from support.cases import CASES

# The default backend on one row per class; on the others, what comes before it: capture and differentiation.
CLASSES = {case.name: str(case) for case in reversed(CASES)}


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fullgraph(case, training):
    backend = "inductor" if CLASSES[case.name] == str(case) else "aot_eager"
    layer = case.layer(training=training)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        x = case.input().requires_grad_()
        twin_x = x.detach().clone().requires_grad_()
        y, z = compiled(x), twin(twin_x)
        dy = torch.randn_like(y)
        y.backward(dy)
        z.backward(dy)
        torch.testing.assert_close(y, z, rtol=2e-7, atol=1e-7 + case.slack(z))
        torch.testing.assert_close(x.grad, twin_x.grad, rtol=2e-7, atol=1e-7 + case.slack(twin_x.grad))
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-7, atol=1e-6 + case.slack(q.grad))
    for name, b in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b, rtol=1e-7, atol=1e-8)
