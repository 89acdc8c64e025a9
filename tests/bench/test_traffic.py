"""Passes and bytes are those of known calls, and the `torch` backend makes no more of them than torch's own layers."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.bench.traffic import measure
from normkit.kernels import select
from support.case import randomize_

N = 4 * 6 * 5 * 5
FLOAT = 4 * N


def counted(step):
    traffic = measure(step, N)
    return traffic.passes, traffic.bytes / FLOAT, traffic.operators


def test_what_an_operator_reads_and_writes():
    x = torch.randn(4, 6, 5, 5)
    assert counted(lambda: x + x) == (1, 2, ["add"])
    assert counted(lambda: x + x.clone()) == (2, 5, ["clone", "add"])
    assert counted(lambda: x.clone().relu_()) == (2, 4, ["clone", "relu_"])
    assert counted(lambda: torch.empty_like(x).copy_(x)) == (1, 2, ["copy_"])
    assert counted(lambda: torch.add(x, x, out=torch.empty_like(x))) == (1, 2, ["add"])
    assert counted(lambda: torch.zeros_like(x)) == (1, 1, ["zeros_like"])
    assert counted(lambda: x.new_zeros(6)) == (0, 0, [])
    assert counted(lambda: x.sum()) == (1, 1, ["sum"])
    assert counted(lambda: x.bfloat16()) == (1, 1.5, ["_to_copy"])


def test_views_and_small_tensors_cost_nothing():
    x, small = torch.randn(4, 6, 5, 5), torch.randn(6)
    assert counted(lambda: x.view(-1).detach().unflatten(0, (4, -1)).transpose(0, 1)) == (0, 0, [])
    assert counted(lambda: small * 2 + small.sum()) == (0, 0, [])
    assert counted(lambda: small.view(1, 6, 1, 1).expand(4, 6, 5, 5)) == (0, 0, [])
    assert counted(lambda: torch.mul(x, small.view(1, 6, 1, 1).expand(4, 6, 5, 5))) == (1, 2, ["mul"])


def test_a_step_of_torchs_batch_norm_takes_four_passes():
    layer, x = nn.BatchNorm2d(6), torch.randn(4, 6, 5, 5, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        torch.autograd.grad(torch.relu(layer(x)), [x, *layer.parameters()], dy)

    names = ["native_batch_norm", "relu", "threshold_backward", "native_batch_norm_backward"]
    assert counted(step) == (4, 10, names)


ACTIVATIONS = {
    None: nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
LAYERS = {
    "batch": ("BatchNorm2d", (6,), {}),
    "batch of rows": ("BatchNorm1d", (6,), {}),
    "group": ("GroupNorm", (3, 6), {}),
    "instance": ("InstanceNorm2d", (6,), {}),
    "instance, affine": ("InstanceNorm2d", (6,), {"affine": True}),
    "instance, tracked": ("InstanceNorm2d", (6,), {"affine": True, "track_running_stats": True}),
    "layer": ("LayerNorm", (5,), {}),
    "layer of maps": ("LayerNorm", ([6, 5, 5],), {}),
    "rms": ("RMSNorm", (5,), {}),
}
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
ROWS = [(which, None) for which in LAYERS] + [("batch", activation) for activation in ACTIVATIONS if activation]


def pair(which, activation, dtype, training):
    name, args, options = LAYERS[which]
    extra = {} if activation is None else {"activation": activation}
    ours = randomize_(getattr(nk, name)(*args, **options, **extra)).to(dtype).train(training)
    theirs = getattr(nn, name)(*args, **options).to(dtype).train(training)
    theirs.load_state_dict(ours.state_dict())
    return ours, nn.Sequential(theirs, ACTIVATIONS[activation]())


def step_of(layer, x, dy, mode):
    def step():
        if mode == "evaluation":
            with torch.no_grad():
                return layer(x)
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], dy)

    return step


@pytest.mark.parametrize("mode", ["training", "evaluation", "evaluation with a gradient"])
@pytest.mark.parametrize(("dtype", "state"), TYPES, ids=["float32", "bfloat16", "bfloat16 with float32 state"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("which", "activation"), ROWS)
def test_no_more_than_torchs_own_layer(which, activation, layout, dtype, state, mode):
    ours, theirs = pair(which, activation, state, mode == "training")
    x, dy = (torch.randn(4, 6, 5, 5).to(dtype) for _ in range(2))
    if which == "batch of rows":
        x, dy = x.movedim(1, -1).reshape(-1, 6), dy.movedim(1, -1).reshape(-1, 6)
    elif layout == "channels_last":
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    if which == "rms" and dtype is not state:
        theirs = copy.deepcopy(theirs).to(dtype)  # torch's goes round its own operator for mixed types, with a warning
    with select.backend("torch"):
        found = measure(step_of(ours, x, dy, mode), N)
    most = measure(step_of(theirs, x, dy, mode), N)
    assert most.passes > 0
    assert found.passes <= most.passes, f"{found.operators}, where torch has {most.operators}"
    assert found.bytes <= most.bytes, f"{found.operators}, where torch has {most.operators}"


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_reference_is_what_the_torch_backend_spares(backend):
    layer, x = nk.BatchNorm2d(6, activation="relu"), torch.randn(4, 6, 5, 5)
    with select.backend(backend):
        found = measure(step_of(layer, x, torch.randn_like(x), "training"), N)
    assert (found.passes == 4) == (backend == "torch")
    assert backend == "torch" or found.bytes > 40 * FLOAT
