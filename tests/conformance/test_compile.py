"""torch.compile takes each layer whole, in training and in evaluation, and changes nothing."""

import copy

import pytest
import torch

from normkit.kernels import select
from support.backends import refuses_loops
from support.bounds import bound_of_any
from support.cases import CASES, taking_part


def family(case):
    """Layers of one code for all ranks."""
    return case.name.rstrip("123d")


# The default backend on one row per family, of maps if it has them; on the others, what comes before it: capture and
# differentiation.
OF_MAPS = [case for case in CASES if case.name.endswith("2d")]
COMPILED = {family(case): str(case) for case in reversed([*OF_MAPS, *CASES])}

# Of the first, the ordinary run takes an operator of ours; plain torch with a value that is held is for the deep one.
MECHANISMS = {"BatchNorm2d"}
# Of the second, one family for each usual kind of graph: one step, a correction, a ring of batches, groups.
FAMILIES = {"BatchNorm", "BatchRenorm", "MovingBatchNorm", "GroupNorm"}


def rows():
    seen = set()
    for case in CASES:
        for training, mode in ((True, "train"), (False, "eval")):
            backend = "inductor" if COMPILED[family(case)] == str(case) else "aot_eager"
            is_first = backend == "aot_eager" and family(case) not in seen
            seen |= {family(case)} if is_first else set()
            is_mechanism = backend == "inductor" and str(case) in MECHANISMS
            is_ordinary = training and ((is_first and family(case) in FAMILIES) or is_mechanism)
            marks = () if is_ordinary else pytest.mark.deep
            yield pytest.param(case, training, backend, id=f"{case}-{mode}-{backend}", marks=marks)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch.compiler.reset()


def test_every_mechanism_is_a_row_of_its_family():
    assert set(COMPILED.values()) >= MECHANISMS


def assert_near(what, found, expected, slack, *terms):
    """Apart by what the bound allows each of two ways to compute a value: the graph may hold the loops or operators."""
    if not expected.is_floating_point():
        assert torch.equal(found, expected)
        return
    allowed = bound_of_any(what, expected, *terms).allowed(expected.dtype).item()
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * allowed + slack)


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
        assert_near("output", y, z, case.slack(z))
        assert_near("dx", x.grad, twin_x.grad, case.slack(twin_x.grad))
    walked = dy.detach().norm()  # by a parameter's gradient, over the two steps
    for p, q in zip(taking_part(layer).values(), taking_part(twin).values(), strict=True):
        assert_near("dweight", p.grad, q.grad, case.slack(q.grad), walked)
    for name, b in twin.named_buffers():
        assert_near("running_var", layer.get_buffer(name), b, 0.0)
