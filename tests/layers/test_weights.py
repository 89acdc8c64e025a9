"""What the normalizations of weights promise: identities, the nets they start, and their refusals."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import normkit as nk
from normkit.layers.scaled_std_conv import ACTIVATION_GAINS

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


# weight_norm


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


# ScaledStdConv2d


def test_standardized_kernels_have_mean_zero_and_the_gains_length():
    layer = nk.ScaledStdConv2d(8, 5, 3, activation_gain="silu", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.add_(3)
        layer.gain.uniform_(0.5, 2)
    w = layer.standardized_weight().flatten(1)
    assert w.mean(1).abs().max() < 1e-14
    torch.testing.assert_close(w.norm(dim=1), 1.7881293296813965 * layer.gain.flatten(), rtol=1e-12, atol=0)


def test_the_weights_scale_and_offset_do_not_matter():
    layer, x = nk.ScaledStdConv2d(4, 4, 3, dtype=torch.float64), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(7).add_(5)
    torch.testing.assert_close(layer(x), y, rtol=1e-12, atol=1e-12)


def test_variance_survives_fifty_layers():
    """Every layer is off by chance, and 50 of them walk: over 24 seeds from 0.82 to 1.28, so a factor of 2 is far out.

    A convolution of torch's initialization loses a factor near 6 per layer (weights of variance 1 / (3 fan-in), and
    half of the squares to ReLU).
    """
    channels, depth = 128, 50
    sizes, options = (channels, channels, 3), {"padding": 1, "padding_mode": "circular", "bias": False}
    x = torch.randn(4, channels, 8, 8)
    for build, survives in (
        (lambda: nk.ScaledStdConv2d(*sizes, **options, activation_gain="relu"), True),
        (lambda: nn.Conv2d(*sizes, **options), False),
    ):
        z = x
        with torch.no_grad():
            for _ in range(depth):
                z = build()(F.relu(z))
        variance = z.var((0, 2, 3)).mean().item()
        assert (0.5 < variance < 2) == survives, variance
        assert survives or variance < 1e-20


def test_gains_are_one_over_the_activations_deviation():
    """The authors' constants are estimates from samples: within a thousandth of the integrals."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for name, gain in ACTIVATION_GAINS.items():
        y = z if name is None else getattr(F, name)(z)
        mean = (y * density).sum()
        assert gain == pytest.approx(((y - mean).square() * density).sum().rsqrt().item(), rel=1e-3)
        assert nk.ScaledStdConv2d(2, 2, 3, activation_gain=name).activation_gain == gain


def test_it_takes_torchs_weights_and_arguments():
    theirs = nn.Conv2d(4, 6, (3, 2), (2, 1), "valid", 2, 2, False, "reflect")
    ours = nk.ScaledStdConv2d(4, 6, (3, 2), (2, 1), "valid", 2, 2, False, "reflect")
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == ["gain"]
    assert not missing.unexpected_keys
    assert "eps=0.0001" in repr(ours)
    assert torch.equal(theirs.weight, ours.weight)
    assert ours(torch.randn(2, 4, 9, 9)).shape == theirs(torch.randn(2, 4, 9, 9)).shape
    assert list(nk.ScaledStdConv2d(4, 4, 3).state_dict()) == ["weight", "bias", "gain"]


def test_scaled_std_conv_refuses():
    for words, options in {
        r"more than 1 weight.*4 input channels in 4 groups.*\(1, 1\)": {"kernel_size": 1, "groups": 4},
        r"eps must be positive.*got 0": {"kernel_size": 3, "eps": 0},
        r"eps must be positive.*got nan": {"kernel_size": 3, "eps": math.nan},
        r"activation_gain must be a positive number.*got -1": {"kernel_size": 3, "activation_gain": -1},
        r"activation_gain must be a positive number.*got inf": {"kernel_size": 3, "activation_gain": math.inf},
        r"got 'rellu'. Did you mean .relu.": {"kernel_size": 3, "activation_gain": "rellu"},
    }.items():
        with pytest.raises(nk.ArgumentError, match=words):
            nk.ScaledStdConv2d(4, 4, **options)
    with pytest.raises(nk.DtypeError, match=r"floating point input; got torch.int64"):
        nk.ScaledStdConv2d(4, 4, 3)(torch.ones(1, 4, 5, 5).long())


# SkipInit and Fixup


def block_branch(channels, layers=2):
    convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(*[m for conv in convs for m in (conv, nn.ReLU())][:-1])


def test_skip_init_starts_as_the_identity_and_learns():
    x = torch.randn(2, 4, 5, 5)
    branch, skip = block_branch(4), nk.SkipInit()
    y = x + skip(branch(x))
    assert torch.equal(y, x)
    assert skip.state_dict() == {"alpha": torch.zeros(1)}
    y.square().sum().backward()
    assert skip.alpha.grad.abs() > 0
    assert branch[0].weight.grad.abs().max() == 0  # until alpha has moved
    with pytest.raises(nk.DtypeError, match=r"SkipInit needs a floating point input; got torch.int64"):
        skip(torch.ones(3).long())


def test_fixup_starts_with_silent_branches_and_classifier():
    branches, classifier = nn.ModuleList(block_branch(4) for _ in range(5)), nn.Linear(4, 3)
    assert nk.fixup_init_(branches, classifier=classifier) is None
    h = x = torch.randn(2, 4, 5, 5)
    for branch in branches:
        assert torch.equal(branch(h), torch.zeros_like(h))
        h = h + branch(h)
    assert torch.equal(h, x)
    assert torch.equal(classifier(h.mean((2, 3))), torch.zeros(2, 3))
    assert all(torch.equal(m.bias, torch.zeros_like(m.bias)) for m in branches.modules() if isinstance(m, nn.Conv2d))


LAYER_FANS = {
    "conv": (lambda: nn.Conv2d(64, 48, 3), 48 * 9),
    "grouped": (lambda: nn.Conv2d(128, 64, 3, groups=4), 16 * 9),
    "transposed": (lambda: nn.ConvTranspose2d(48, 64, 3), 64 * 9),
    "linear": (lambda: nn.Linear(200, 150), 150),
    "conv1d": (lambda: nn.Conv1d(64, 80, 5), 80 * 5),
}


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("name", LAYER_FANS)
def test_fixup_scales_by_the_formula(name, m):
    build, fan_out = LAYER_FANS[name]
    branches = [nn.Sequential(*(build() for _ in range(m))) for _ in range(9)]
    nk.fixup_init_(iter(branches))
    drawn = torch.cat([layer.weight.flatten() for branch in branches for layer in branch[:-1]]).double()
    expected = math.sqrt(2 / fan_out) * 9 ** (-1 / (2 * m - 2))
    # The deviation of n normal values is itself known to 1/sqrt(2n); five times that is no accident.
    assert drawn.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(drawn)))
    assert drawn.mean().abs() < 5 * expected / math.sqrt(len(drawn))
    assert all(not branch[-1].weight.any() for branch in branches)


def test_fixup_counts_each_branch_on_its_own():
    single, double = nn.Linear(300, 300), nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300, bias=False))
    nk.fixup_init_([single, double])
    assert not single.weight.any()
    assert double[0].weight.std().item() == pytest.approx(math.sqrt(2 / 300) * 2**-0.5, rel=0.02)


def test_fixup_refuses_and_leaves_all_as_it_was():
    good = block_branch(4)
    before = copy.deepcopy(good.state_dict())
    for words, branches, options in (
        ("at least one residual branch; got none", [], {}),
        ("list of branches; got one Sequential", good, {}),
        ("branch 1 is a str", [good, "conv"], {}),
        ("branch 1, a ReLU, has none", [good, nn.ReLU()], {}),
        ("branch 1, 1: BatchNorm2d. Remove", [good, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))], {}),
        ("found branch 1, 0: BatchNorm2d", [good, nn.Sequential(nk.BatchNorm2d(4))], {}),
        ("found branch 1, 0: LayerNorm", [good, nn.Sequential(nn.LayerNorm(4))], {}),
        ("found branch 1, itself: ScaledStdConv2d", [good, nk.ScaledStdConv2d(4, 4, 3)], {}),
        ("branch 1 has one of an earlier", [good, good], {}),
        ("branch 1, itself: ParametrizedLinear are param", [good, nk.weight_norm(nn.Linear(4, 4))], {}),
        ("branch 1, itself: LazyLinear is lazy", [good, nn.LazyLinear(4)], {}),
        ("as classifier; got Sequential", [good], {"classifier": nn.Sequential(nn.Linear(4, 2))}),
    ):
        with pytest.raises(nk.ArgumentError, match=words):
            nk.fixup_init_(branches, **options)
        assert all(torch.equal(good.state_dict()[name], t) for name, t in before.items())


# adaptive_gradient_clip_


def clipped(w, g, clip, eps):
    """The paper's rule, one unit at a time."""
    w, g = w.detach().double().numpy(), g.double().numpy().copy()
    units = [()] if w.squeeze().ndim <= 1 else list(range(len(w)))
    for i in units:
        length, allowed = np.sqrt((g[i] ** 2).sum()), clip * max(np.sqrt((w[i] ** 2).sum()), eps)
        if length > allowed:
            g[i] = g[i] * allowed / length
    return torch.from_numpy(np.asarray(g))


SHAPES = [(), (1,), (7,), (5, 6), (5, 1), (1, 6), (6, 3, 4), (6, 3, 2, 2), (4, 1, 1, 1), (4, 2, 2, 2, 2)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clipping_is_the_rule_unit_by_unit(shape, dtype):
    p = nn.Parameter(torch.randn(shape).to(dtype))
    g = torch.randn(shape)
    if shape:  # from far below the bound to far above it
        g = g * torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    g = g.to(dtype)
    p.grad = g.clone()
    kept = p.detach().clone()
    assert nk.adaptive_gradient_clip_(p, clip=0.3) is None
    expected = clipped(p, g, 0.3, 1e-3)
    torch.testing.assert_close(p.grad.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert p.grad.dtype == dtype
    assert torch.equal(p, kept)


def test_units_within_the_bound_are_not_touched_at_all():
    p = nn.Parameter(torch.ones(3, 4))
    p.grad = torch.tensor([[1e-3], [0.0], [5.0]]) * torch.randn(3, 4)
    before = p.grad.clone()
    nk.adaptive_gradient_clip_([p], clip=0.01)
    assert torch.equal(p.grad[:2], before[:2])
    assert p.grad[2].norm().item() == pytest.approx(0.02)


def test_zero_weights_can_move_and_zero_gradients_stay():
    p = nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad, torch.tensor([[0.6e-5, 0.8e-5, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_unit_that_is_not_finite_is_left_to_be_found(bad):
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.tensor([[bad, 4.0, 0.0], [3.0, 4.0, 0.0]])
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad[0], torch.tensor([bad, 4.0, 0.0]), equal_nan=True)
    assert p.grad[1].norm().item() == pytest.approx(0.01 * math.sqrt(3))


def test_half_precision_lengths_do_not_overflow():
    p = nn.Parameter(torch.full((2, 1000), 300.0).half())
    p.grad = torch.full((2, 1000), 300.0).half()
    nk.adaptive_gradient_clip_(p)
    torch.testing.assert_close(p.grad, torch.full((2, 1000), 3.0).half())


def test_a_generator_is_used_once_and_parameters_without_gradient_are_passed_over():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0](torch.randn(5, 3)).square().sum().mul(1e3).backward()
    given = list(model.parameters())
    expected = [None if p.grad is None else clipped(p, p.grad, 0.01, 1e-3).float() for p in given]
    nk.adaptive_gradient_clip_(p for p in given)
    for p, e in zip(given, expected, strict=True):
        assert (p.grad is None) == (e is None)
        assert e is None or torch.allclose(p.grad, e, rtol=1e-6)
    nk.adaptive_gradient_clip_([])


def test_clipping_refuses_before_it_changes_anything():
    p, table = nn.Parameter(torch.ones(3)), nn.Embedding(5, 2, sparse=True)
    p.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    for error, words, parameters, options in (
        (ValueError, "clip must be positive.*got 0", p, {"clip": 0}),
        (ValueError, "clip must be positive.*got nan", p, {"clip": math.nan}),
        (ValueError, "eps must be positive.*got -1", p, {"eps": -1}),
        (TypeError, r"dense gradients.*shape \(5, 2\).*sparse_coo.*sparse=False", [p, table.weight], {}),
        (ValueError, r"got a tuple among them.*model.parameters", [p, ("name", p)], {}),
    ):
        with pytest.raises(error, match=words) as caught:
            nk.adaptive_gradient_clip_(parameters, **options)
        assert isinstance(caught.value, nk.NormkitError)
        assert torch.equal(p.grad, torch.ones(3))
