"""Whatever is passed to a norm, the loops give what the reference gives, or leave it to torch's operators.

Of those only the form is checked here: types, shapes, what is refused, and that nothing else was written to. Their
numbers are torch's, which overflow and cancel where the reference does not.

More examples than these, and other ones every time:

    NORMKIT_FUZZ=5000 pytest tests/kernels/test_fuzz.py --base random
"""

import contextlib
import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normkit as nk
from normkit.kernels import select
from support.cases import CASES
from support.problems import copied, problems
from support.rounding import assert_rounded_alike, slack_of

pytest.importorskip("normkit._core", reason="normkit was built without its C++ core")

from support.instruction_sets import runnable, using

SEARCH = int(os.environ.get("NORMKIT_FUZZ", "0"))
bounded = settings(max_examples=SEARCH or 7 * settings.default.max_examples)  # 56, and 280 with --deep

BY_NAME = {str(case): case for case in CASES}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MODES = {"grad": contextlib.nullcontext, "no grad": torch.no_grad, "inference": torch.inference_mode}


@contextlib.contextmanager
def setting(instruction_set, threads):
    torch.set_num_threads(threads)
    try:
        with using(instruction_set):
            yield
    finally:
        torch.set_num_threads(1)


def solve(problem, backend, mode):
    """All results by name; or, where it is refused, what is said."""
    leaves = problem.leaves()
    with select.backend(backend), MODES[mode]():
        try:
            y = problem(leaves)
        except nk.NormkitError as error:
            return {"refused": (type(error), str(error))}
        wanted = [name for name in ("x", "weight", "bias", "residual") if name in leaves and leaves[name].requires_grad]
        grads = torch.autograd.grad(y, [leaves[n] for n in wanted], leaves["dy"]) if wanted and y.requires_grad else ()
    results = {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=bool(grads))}
    if "mean" in leaves:
        results |= {name: leaves[name] for name in ("mean", "var")}
    check_untouched(problem, leaves)
    return results


def check_untouched(problem, leaves):
    """Nothing was written but the running statistics, and not beside them."""
    for name, before in problem.tensors.items():
        expected = copied(before)
        if name in ("mean", "var"):
            expected.copy_(leaves[name])
        memory = [
            torch.empty(0, dtype=torch.uint8).set_(t.detach().untyped_storage()) for t in (leaves[name], expected)
        ]
        assert torch.equal(*memory), f"{name} was written to"


@pytest.mark.parametrize("family", ["batch", "group", "instance", "layer", "rms"])
@bounded
@given(data=st.data())
def test_the_norms(family, data):
    check(data, problems(family))


@pytest.mark.parametrize("family", ["batch", "instance"])
@bounded
@given(data=st.data())
def test_the_norms_with_stored_statistics(family, data):
    check(data, problems(family, stored=True))


def check(data, calls):
    problem = data.draw(calls)
    mode = data.draw(st.sampled_from(["grad"] * 4 + ["no grad", "inference"]))
    with setting(data.draw(st.sampled_from(runnable()[::-1])), data.draw(st.integers(1, 3))):
        found, expected = (solve(problem, backend, mode) for backend in ("native", "reference"))
        if is_left_to_torch(found):
            check_form(solve(problem, "auto", mode), expected)
            return
    assert found.keys() == expected.keys()
    if "refused" in found:
        assert found == expected
        return
    slack = slack_of(problem) if found["y"].numel() else {}
    for name, result in expected.items():
        one, other = found[name], result
        if name == "dresidual":  # in the type of the output, whatever the residual's is
            one, other = (t.to(found["y"].dtype) for t in (one, other))
        lanes = torch.float64 if problem.tensors["x"].dtype is torch.float64 else torch.float32
        assert_rounded_alike(one, other, slack.get(name, torch.zeros(())), name, lanes)
    assert torch.equal(found["y"].isnan(), expected["y"].isnan())


def is_left_to_torch(found):
    return found.get("refused", (None,))[0] is nk.BackendError


def check_form(found, expected):
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        if name == "refused":
            assert found[name] == result
        else:
            assert (found[name].shape, found[name].dtype) == (result.shape, result.dtype), name


def step(layer, x, dy, backend):
    """The output, the gradients and the state after one step of a copy of the layer."""
    layer, x = copy.deepcopy(layer), copied(x).requires_grad_()
    with select.backend(backend):
        y = layer(x)
        y.backward(dy)
    grads = {f"d{name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | grads | layer.state_dict()


@bounded
@given(data=st.data())
def test_the_layers(data):
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    case = BY_NAME[data.draw(st.sampled_from(sorted(BY_NAME)))]
    shape = tuple(data.draw(st.integers(2, 9)) if d in case.free else n for d, n in enumerate(case.shape))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = case.input(dtype, mean=data.draw(st.sampled_from([0.0, 0.3, -30.0])), shape=shape)
    if data.draw(st.booleans()) and len(shape) in CHANNELS_LAST:
        x = x.contiguous(memory_format=CHANNELS_LAST[len(shape)])
    layer = case.layer(data.draw(st.sampled_from([dtype, torch.float32])), data.draw(st.booleans()))
    dy = torch.randn_like(x)
    with setting(data.draw(st.sampled_from(runnable()[::-1])), data.draw(st.integers(1, 3))):
        expected = step(layer, x, dy, "reference")
        try:
            found = step(layer, x, dy, "native")
        except nk.BackendError:
            check_form(step(layer, x, dy, "auto"), expected)
            return
    for name, result in expected.items():
        if result is None:  # the gradient of what takes no part
            assert found[name] is None
            continue
        # Some layers are made of several steps, and round between them. Sums of gradients walk as far as their norm.
        few = max(16 * torch.finfo(t.dtype).eps for t in (x, result)) if result.is_floating_point() else 0.0
        walked = dy.double().norm().item() if name.startswith("d") else 0.0
        slack = torch.as_tensor(few * max(result.double().abs().max().item(), walked))
        assert_rounded_alike(found[name], result, slack, name)
