"""Weight normalization: torch's parametrization, and the paper's initialization from data."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import normkit as nk

LAYERS = {
    "linear": (lambda **k: nn.Linear(6, 5, **k), (40, 6), {}),
    "linear-tokens": (lambda **k: nn.Linear(6, 5, **k), (8, 7, 6), {}),
    "conv1d": (lambda **k: nn.Conv1d(4, 6, 3, **k), (8, 4, 9), {}),
    "conv2d": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **k), (8, 4, 6, 7), {}),
    "conv2d-grouped": (lambda **k: nn.Conv2d(4, 6, 3, groups=2, **k), (8, 4, 6, 7), {}),
    "conv3d": (lambda **k: nn.Conv3d(2, 3, 2, **k), (4, 2, 4, 5, 3), {}),
    "transposed1d": (lambda **k: nn.ConvTranspose1d(4, 6, 3, **k), (8, 4, 9), {"dim": 1}),
    "transposed2d": (lambda **k: nn.ConvTranspose2d(4, 6, 3, stride=2, **k), (8, 4, 5, 4), {"dim": 1}),
    "transposed2d-dim-0": (lambda **k: nn.ConvTranspose2d(4, 6, 3, **k), (8, 4, 5, 4), {}),
    "transposed2d-grouped": (lambda **k: nn.ConvTranspose2d(4, 6, 3, groups=2, **k), (8, 4, 5, 4), {"dim": 1}),
    "conv2d-one-length": (lambda **k: nn.Conv2d(4, 6, 3, **k), (8, 4, 6, 7), {"dim": None}),
}


def untouched(module, error, words, *args, **kwargs):
    """weight_norm refuses, with these words, and the module is as it was."""
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=words) as caught:
        nk.weight_norm(module, *args, **kwargs)
    assert isinstance(caught.value, nk.NormkitError)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["32", "64"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_start_with_zero_mean_and_unit_variance(name, dtype, tolerance):
    build, shape, options = LAYERS[name]
    module, data = build(dtype=dtype), torch.randn(shape, dtype=dtype) * 3 + 2
    weight = module.weight.detach().clone()
    assert nk.weight_norm(module, data=data, **options) is module
    y = module(data).detach().double()
    channels = y.flatten(0, -2) if isinstance(module, nn.Linear) else y.movedim(1, -1).flatten(0, -2)
    assert channels.mean(0).abs().max() < tolerance
    assert (channels.var(0, unbiased=False) - 1).abs().max() < tolerance
    # Every output channel has kept its direction.
    if not isinstance(module, nn.modules.conv._ConvTransposeNd):
        cosine = F.cosine_similarity(module.weight.detach().flatten(1), weight.flatten(1))
        torch.testing.assert_close(cosine, torch.ones_like(cosine))


@pytest.mark.parametrize("name", ["linear", "conv2d-grouped", "transposed2d"])
def test_lengths_and_bias_are_the_papers(name):
    build, shape, options = LAYERS[name]
    module, data = build(dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    v = module.weight.detach().clone()
    unit = options.get("dim", 0)
    lengths = torch.linalg.vector_norm(v, dim=[d for d in range(v.dim()) if d != unit], keepdim=True)
    plain = copy.deepcopy(module)
    plain.load_state_dict({"weight": v / lengths, "bias": torch.zeros_like(module.bias)})
    t = plain(data).detach()
    t = t if t.dim() == 2 else t.movedim(1, -1).flatten(0, -2)
    nk.weight_norm(module, data=data, **options)
    held = module.parametrizations.weight
    torch.testing.assert_close(held.original0.flatten(), 1 / t.std(0, unbiased=False), rtol=1e-12, atol=0)
    torch.testing.assert_close(module.bias, -t.mean(0) / t.std(0, unbiased=False), rtol=1e-11, atol=1e-12)
    assert torch.equal(held.original1, v)


@pytest.mark.parametrize("name", LAYERS)
def test_without_data_it_is_torchs(name):
    build, shape, options = LAYERS[name]
    module = build()
    theirs = parametrizations.weight_norm(copy.deepcopy(module), **options)
    ours = nk.weight_norm(module, **options)
    x = torch.randn(shape)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_state_goes_both_ways_between_torch_and_us():
    ours = nk.weight_norm(nn.Conv2d(3, 4, 3), data=torch.randn(8, 3, 6, 6))
    theirs = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    back = nk.weight_norm(nn.Conv2d(3, 4, 3))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    back.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), back(x))
    assert list(ours.state_dict()) == [
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    ]


def test_weight_and_gradients_are_the_formulas():
    module = nk.weight_norm(nn.Linear(6, 5, dtype=torch.float64))
    g, v = module.parametrizations.weight.original0, module.parametrizations.weight.original1
    with torch.no_grad():
        g.normal_()
    length = v.norm(dim=1, keepdim=True).detach()
    w = (g * v / length).detach()
    torch.testing.assert_close(module.weight, w, rtol=1e-13, atol=1e-14)
    dw = torch.randn_like(w)
    module.weight.backward(dw)
    dg = (dw * v).sum(1, keepdim=True).detach() / length
    torch.testing.assert_close(g.grad, dg, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(v.grad, (g / length * dw - g * dg / length**2 * v).detach(), rtol=1e-12, atol=1e-13)
    assert (v.grad * v).sum(1).abs().max() < 1e-13  # only the direction moves


def test_data_leaves_gradients_and_modes_alone():
    module = nn.Linear(3, 2).eval()
    module.bias.requires_grad_(False)
    data = torch.randn(9, 3, requires_grad=True)
    nk.weight_norm(module, data=data)
    assert data.grad is None
    assert not module.bias.requires_grad
    assert not module.training
    assert module.parametrizations.weight.original0.requires_grad
    with torch.autocast("cpu"):  # the statistics do not feel it
        other = nk.weight_norm(nn.Linear(3, 2), data=torch.randn(9, 3) + 5)
    assert other.bias.isfinite().all()


def test_weight_norm_refuses():
    data = torch.randn(9, 3)
    untouched(nn.Linear(3, 2, bias=False), ValueError, r"needs a bias.*this Linear has none.*bias=True", data=data)
    untouched(nn.Linear(3, 2), ValueError, r"\(N, 3\).*inputs of this Linear; got \(9, 4\)", data=torch.randn(9, 4))
    untouched(nn.Linear(3, 2), ValueError, r"\(N, 3\).*got \(3,\)", data=torch.randn(3))
    untouched(nn.Conv1d(3, 2, 1), ValueError, r"\(N, 3, L\).*got \(9, 3\)", data=data)
    untouched(nn.Conv2d(3, 2, 1), ValueError, r"\(N, 3, H, W\).*got \(3, 8, 8\)", data=torch.randn(3, 8, 8))
    untouched(nn.Conv3d(3, 2, 1), ValueError, r"\(N, 3, D, H, W\).*got \(9, 3\)", data=data)
    untouched(nn.Linear(3, 2), ValueError, r"more than 1 value.*got \(1, 3\).*larger batch", data=data[:1])
    untouched(nn.Linear(3, 2), ValueError, r"more than 1 value.*got \(0, 3\)", data=data[:0])
    untouched(nn.Linear(3, 2), ValueError, r"channels \[0, 1\] are constant", data=torch.full((9, 3), 0.1))
    untouched(nn.Conv2d(3, 2, 3), ValueError, r"channels \[0, 1\] are constant", data=torch.full((4, 3, 9, 9), 1e4))
    untouched(nn.Linear(3, 2), FloatingPointError, r"needs finite data", data=data.clone().fill_(torch.nan))
    untouched(nn.Linear(3, 2), TypeError, r"floating point input; got torch.int64", data=torch.ones(9, 3).long())
    untouched(nn.Embedding(3, 2), ValueError, r"linear layer or a convolution.*'weight' of Embedding", data=data)
    untouched(nk.ScaledStdConv2d(3, 2, 3), ValueError, r"of ScaledStdConv2d", data=torch.randn(2, 3, 5, 5))
    untouched(nn.Linear(3, 2), ValueError, r"'bias' of Linear", "bias", data=data)
    untouched(nn.Linear(3, 2), ValueError, r"a tensor 'nothing' in Linear; got None", "nothing")
    untouched(nk.weight_norm(nn.Linear(3, 2)), ValueError, r"parametrized already.*remove_parametrizations")
    zero = nn.Linear(3, 3)
    nn.init.zeros_(zero.weight[1])
    untouched(zero, ValueError, r"all zero at \[1\] of dimension 0.*NaN")


def test_a_torch_error_leaves_the_module_too():
    module = nn.Conv2d(3, 2, 5)
    with pytest.raises(RuntimeError, match="Kernel size"):
        nk.weight_norm(module, data=torch.randn(4, 3, 2, 2))
    assert not parametrize.is_parametrized(module)
