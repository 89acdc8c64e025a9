"""Every row on every backend: within the bound against float64, or refused by name with a reason."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.activations import ACTIVATIONS
from normkit.kernels import select
from support.bounds import bound_of_any
from support.cases import CASES, TWINS, taking_part
from support.depth import thinned

BACKENDS = thinned(
    ["native", "torch", "reference"], lambda backend: backend != "reference"
)  # which most other tests compare with
DTYPES = thinned([torch.float32, torch.bfloat16, torch.float16], lambda dtype: dtype is torch.float32)


def step(layer, forward, x, dy):
    """Everything that one step of a layer computes, by name."""
    x = x.detach().clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    found = {"output": y.detach(), "dx": x.grad} | {f"d{name}": p.grad for name, p in taking_part(layer).items()}
    return found | {name: b for name, b in layer.named_buffers() if b.is_floating_point()}


def step_on(backend, layer, x, dy):
    """The step of a copy of the layer; or, if the backend cannot run it, what it says."""
    layer = copy.deepcopy(layer)
    try:
        with select.backend(backend):
            return step(layer, layer, x, dy), None
    except nk.BackendError as error:
        return {}, str(error)


def step_by_torch(layer, x, dy):
    """The step of torch's own layer of this class, with its activation behind it; nothing, if torch has none."""
    torchs = getattr(layer, "_torch", None)
    if torchs is None or not issubclass(type(layer), torchs):
        return {}
    if isinstance(layer, nn.LocalResponseNorm) or (layer.weight is None and getattr(layer, "bias", None) is not None):
        return {}  # which torch cannot compute in half precision; and whose operators take no bias alone
    twin, activation = copy.deepcopy(layer), getattr(layer, "activation", None)

    def forward(x):
        y = torchs.forward(twin, x)
        return y if activation is None else ACTIVATIONS[activation].function(y)

    return step(twin, forward, x, dy)


def kind_of(name):
    if name in ("output", "dx"):
        return name
    if name.startswith("d"):
        return "dweight"
    return "running_var" if name.endswith("var") else "running_mean"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_bound_or_refused(case, dtype, training, backend):
    layer, x = case.layer(dtype, training), case.input(dtype)
    exact = case.build().double().train(training)
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        dy = torch.randn_like(copy.deepcopy(layer)(x))
    truth, _ = step_on("reference", exact, x.double(), dy.double())
    found, refused = step_on(backend, layer, x, dy)
    if refused is not None:
        assert 'Ask for backend "auto"' in refused
        assert backend != "reference"
        return
    assert found["output"].dtype == found["dx"].dtype == dtype
    torchs = step_by_torch(layer, x, dy)
    for name, result in found.items():
        terms = []
        if kind_of(name) == "dweight":  # partial sums of gradients times values of a size about one
            terms = [dy.double().norm() / max(1, result.numel()) ** 0.5]
        bound = bound_of_any(kind_of(name), truth[name], *terms)._replace(unsure=case.slack(truth[name], dtype))
        bound.check(result, torchs.get(name))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", TWINS, ids=str)
def test_torch_runs_whatever_torch_has(case, training):
    if case.name == "LocalResponseNorm":  # torch makes it of an average pool, in the input's type
        return
    _, refused = step_on("torch", case.layer(training=training), x := case.input(), torch.randn_like(x))
    assert refused is None
