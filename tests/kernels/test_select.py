"""The choice of a backend: one asked for by name runs or raises, and only where it was asked for."""

from threading import Thread

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import normkit as nk
from normkit.kernels import core, plans, select
from normkit.kernels.reference import Recipe
from support.cases import CASES
from support.depth import first_of_each

ROWS = first_of_each(CASES, lambda case: case.name)
needs_core = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))


def refusal(call):
    """The text of the error, if the loops cannot run; any other error is raised."""
    try:
        call()
    except nk.BackendError as error:
        return str(error)
    return ""


@needs_core
@pytest.mark.parametrize("gradient", [True, False], ids=["gradient", "no gradient"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_the_loops_asked_for_run_or_raise(case, training, gradient, counted):
    layer, x = case.layer(training=training), case.input().requires_grad_(gradient)
    with select.backend("native"), torch.set_grad_enabled(gradient):
        refused = refusal(lambda: layer(x))
    assert 'Ask for backend "auto"' in refused or (counted.calls > 0 and not refused)


@needs_core
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_the_reference_asked_for_is_what_runs(case, training, counted):
    with select.backend("reference"):
        case.layer(training=training)(case.input())
    assert counted.calls == 0


@needs_core
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_torch_asked_for_runs_or_raises(case, training, counted):
    layer, x = case.layer(training=training), case.input().requires_grad_()
    with select.backend("torch"), Operators(x.numel()) as operators:
        refused = refusal(lambda: layer(x))
    assert counted.calls == 0
    if refused:
        assert 'Ask for backend "auto"' in refused
        assert not operators.names & FUSED
    else:  # one of torch's norms, or a formula in the type that they would compute in
        assert operators.names & (FUSED | ROOTS | BOUNDED)
        assert not operators.in_double


class Operators(TorchDispatchMode):
    """The names of the operators that run, and of those with a result in float64 of at least this many values."""

    def __init__(self, large):
        super().__init__()
        self.names, self.in_double, self.large = set(), set(), large

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        self.names.add(name)
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64 and result.numel() >= self.large:
            self.in_double.add(name)
        return result


# Of a root mean square norm, torch has one operator on GPUs, and on CPUs what it is made of.
FUSED = {"native_batch_norm", "native_group_norm", "native_layer_norm", "_fused_rms_norm", "rsqrt"}
ROOTS = {"sqrt"}  # of layers that torch does not have
BOUNDED = {"tanh", "erf"}  # of functions in the place of norms


REFUSED = {
    "local response": lambda x: nk.functional.local_response_norm(x, 3),
    "moments with a gradient": lambda x: nk.functional.batch_moments(x),
    "stored statistics with a gradient": lambda x: nk.functional.batch_norm(x, x[0, :, 0, 0], x[1, :, 0, 0].exp()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_functions_without_loops_say_so(what):
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    with select.backend("native"), pytest.raises(nk.BackendError, match=what):
        REFUSED[what](x)
    REFUSED[what](x)


def test_an_unknown_backend_is_refused():
    with pytest.raises(nk.ArgumentError, match="backend must be one of"), select.backend("cuda"):
        pass


def test_what_was_asked_for_before_is_restored():
    with select.backend("reference"):
        with pytest.raises(KeyError), select.backend("native"):
            raise KeyError
        assert select.requested() == "reference"
    assert select.requested() == "auto"


def in_a_thread(function):
    found = []
    thread = Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


def test_other_threads_keep_their_own_choice():
    with select.backend("reference"):
        assert in_a_thread(select.requested) == "auto"

    def asked():
        with select.backend("native"):
            return select.requested()

    assert in_a_thread(asked) == "native"
    assert select.requested() == "auto"


@needs_core
def test_a_block_in_one_thread_leaves_the_kernels_of_another_alone(counted):
    layer, x = nk.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    with select.backend("reference"):
        layer(x)
        assert counted.calls == 0
        in_a_thread(lambda: layer(x))
        assert counted.calls > 0


@needs_core
def test_a_backward_in_another_thread_follows_its_forward(counted):
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    with select.backend("reference"):
        y = nk.BatchNorm2d(3)(x)
    in_a_thread(lambda: y.sum().backward())
    assert counted.calls == 0
    assert x.grad is not None


@needs_core
def test_compiled_code_follows_the_choice_of_its_thread():
    traced = []

    def backend(module, _):
        traced.append(any("normkit" in str(node.target) for node in module.graph.nodes))
        return module

    compiled, x = torch.compile(nk.LayerNorm(5), fullgraph=True, backend=backend), torch.randn(3, 5)
    compiled(x)
    with select.backend("reference"):
        compiled(x)
        in_a_thread(lambda: compiled(x))
    compiled(x)
    assert traced == [True, False]
    torch.compiler.reset()


@needs_core
def test_compiled_code_refuses_what_has_no_loops():
    compiled, x = torch.compile(nk.EvoNormS0(4, 2), backend="eager"), torch.randn(2, 4, 3, 3)
    compiled(x)
    with select.backend("native"), pytest.raises(nk.BackendError, match="compiled code"):
        compiled(x)
    torch.compiler.reset()


def test_the_status_without_a_core_says_why(monkeypatch):
    monkeypatch.setattr(core, "WHY_NOT", "there is none")
    assert select.status() == {"backend": "torch", "why": "there is none"}


def test_the_status_names_the_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert select.status()["backend on cuda"] == "torch: the C++ loops run on CPUs"


@needs_core
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[..., ::2],
        lambda x: x.to("meta"),
    ],
    ids=["float64", "strided", "another device"],
)
def test_what_the_loops_cannot_take_runs_on_torch(change):
    x = change(torch.randn(4, 3, 6, 6))
    layer = nk.BatchNorm2d(3).to(x.device).to(x.dtype)
    if isinstance(plans.plan(x, Recipe((0, 2, 3), 1e-5), layer.weight, layer.bias), str):
        with Operators(large=0) as operators:
            layer(x)
        assert "native_batch_norm" in operators.names


def test_without_a_core_torch_runs(monkeypatch):
    monkeypatch.setattr(core, "WHY_NOT", "there is none")
    layer, x = nk.BatchNorm2d(3), torch.randn(4, 3, 6, 6)
    twin = nn.BatchNorm2d(3)
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(layer.running_var, twin.running_var)


@needs_core
def test_the_status_names_the_loops_in_use():
    status = select.status()
    assert status["backend"] == "native"
    assert status["instruction set"] == core.instruction_set()
