"""Torch's own operators with our options around them: what the reference computes, within torch's own errors."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import normkit as nk
from normkit.bench.traffic import measure
from normkit.kernels import fused, select
from normkit.kernels.reference import Recipe
from normkit.moments import Moments
from support.bounds import Step, bounds_of
from support.case import randomize_
from support.depth import thinned

ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]
LAYERS = {
    "batch": (lambda **o: nk.BatchNorm2d(6, **o), (0, 2, 3)),
    "rows": (lambda **o: nk.BatchNorm1d(6, **o), (0,)),
    "positions": (lambda **o: nk.PositionBatchNorm2d(6, 5, 7, **o), (0,)),
    "groups": (lambda **o: nk.GroupNorm(3, 6, **o), (2, 3, 4)),
    "instances": (lambda **o: nk.InstanceNorm2d(6, affine=True, **o), (2, 3, 4)),
    "last": (lambda **o: nk.LayerNorm(7, **o), (3,)),
    "rms": (lambda **o: nk.RMSNorm(7, eps=1e-5, **o), (3,)),
    "scale": (lambda **o: nk.ScaleNorm(7, **o), (3,)),
}
MASKED = ["batch", "groups", "instances"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shape_of(which):
    return (8, 6) if which == "rows" else (8, 6, 5, 7)


def views(which, x, layer):
    """The input and the parameters as a kernel sees them."""
    groups = {"groups": (3, 2), "instances": (6, 1)}.get(which)
    divided = x if groups is None else x.unflatten(1, groups)
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    shape = (1, *(groups or (6,)), 1, 1)
    if which == "rows":
        shape = (1, 6)
    if which in ("positions", "last", "rms", "scale"):
        shape = (1,) * (x.dim() - weight.dim()) + tuple(weight.shape)
    if which == "scale":
        weight = weight.double() / 7**0.5
    return divided, weight.reshape(shape), None if bias is None else bias.detach().reshape(shape)


def mask_of(x):
    mask = torch.rand(x.shape[0], *x.shape[2:]) < 0.7
    mask[:, 0] = True
    return mask


def step_of(which, layer, x, residual, mask, dy):
    divided, weight, bias = views(which, x, layer)

    def same(t):
        return None if t is None else t.reshape(divided.shape)

    seen = None if mask is None else mask.reshape(x.shape[0], *[1] * (divided.dim() - 3), *x.shape[2:])
    centred, running = which not in ("rms", "scale"), None
    if which in ("batch", "rows", "positions"):
        running = layer.running_mean.clone(), layer.running_var.clone()
    over = LAYERS[which][1]
    return Step(
        divided, over, layer.eps, weight, bias, same(residual), seen, layer.activation, centred, None, same(dy), running
    )


def by_torch(which, layer, x, residual, mask):
    """The call as it is written in plain torch; a mask by hand, in float32."""
    weight, bias, eps = layer.weight, getattr(layer, "bias", None), layer.eps
    if mask is not None:
        z = masked_by_hand(*(t.float() for t in views(which, x, layer)[:1]), which, layer, mask).reshape(x.shape)
        z = z.to(x.dtype)
    elif which in ("batch", "rows"):
        z = F.batch_norm(x, layer.running_mean, layer.running_var, weight, bias, True, 0.1, eps)
    elif which == "positions":
        flat = (t.flatten() for t in (layer.running_mean, layer.running_var, weight, bias))
        z = F.batch_norm(x.flatten(1), *flat, True, 0.1, eps).reshape(x.shape)
    elif which in ("groups", "instances"):
        z = F.group_norm(x, 3 if which == "groups" else 6, weight, bias, eps)
    elif which == "last":
        z = F.layer_norm(x, (7,), weight, bias, eps)
    elif which == "rms":
        z = F.rms_norm(x, (7,), weight.to(x.dtype), eps)
    else:
        z = F.rms_norm(x, (7,), None, eps) * (weight / 7**0.5).to(x.dtype)
    z = z if residual is None else z + residual
    return z if layer.activation is None else select.reference.ACTIVATIONS[layer.activation].function(z)


def masked_by_hand(x, which, layer, mask):
    over, counted = LAYERS[which][1], mask.reshape(x.shape[0], *[1] * (x.dim() - 3), *x.shape[-2:])
    n = counted.expand(x.shape).sum(over, keepdim=True)
    mean = (x * counted).sum(over, keepdim=True) / n
    var = ((x - mean).square() * counted).sum(over, keepdim=True) / n
    shape = (1, 6, 1, 1) if which == "batch" else (1, *x.shape[1:3], 1, 1)
    if which == "batch":
        layer.running_mean.lerp_(mean.detach().flatten(), 0.1)
        layer.running_var.lerp_((var * n / (n - 1)).detach().flatten(), 0.1)
    return (x - mean) / (var + layer.eps).sqrt() * layer.weight.reshape(shape) + layer.bias.reshape(shape)


def results(call, layer, x, residual, dy):
    """Everything that a step computes, by the names of the bounds."""
    leaves = {"x": x, "residual": residual}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items() if t is not None}
    y = call(leaves["x"], leaves.get("residual"))
    y.backward(dy)
    found = {"output": y} | {f"d{name}": t.grad for name, t in leaves.items()}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters()}
    found |= {name: b for name, b in layer.named_buffers() if b.is_floating_point()}
    if isinstance(layer, nk.ScaleNorm):
        found["dweight"] = found["dweight"] * 7**0.5
    return found


def check(which, dtype, activation, with_residual, with_mask, mean=0.3, state=torch.float32):
    layer = randomize_(LAYERS[which][0](activation=activation)).to(state)
    twin = copy.deepcopy(layer).to(torch.float32)
    x, residual, dy = (torch.randn(shape_of(which), dtype=torch.float64) for _ in range(3))
    x, residual, dy = (1.3 * x + mean).to(dtype), residual.to(dtype) if with_residual else None, dy.to(dtype)
    mask = mask_of(x) if with_mask else None
    options = {"mask": mask} if with_mask else {}
    bounds = bounds_of(step_of(which, layer, x, residual, mask, dy))
    with select.backend("torch"):
        found = results(lambda x, r: layer(x, residual=r, **options), layer, x, residual, dy)
    torchs = results(lambda x, r: by_torch(which, twin, x, r, mask), twin, x, residual, dy)
    assert found["output"].dtype == found["dx"].dtype == dtype
    assert found.keys() == torchs.keys()
    for name, result in found.items():
        rounds_terms = activation is not None and name in ("dweight", "dbias") and dtype.itemsize == 2
        bounds[name].check(result, torchs[name], dtype if rounds_terms else None)


@pytest.mark.parametrize("with_residual", thinned([False, True], lambda with_residual: with_residual), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("which", LAYERS)
def test_within_the_bound(which, dtype, activation, with_residual):
    check(which, dtype, activation, with_residual, False)


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("mean", [0.3, 100.0])
@pytest.mark.parametrize("which", MASKED)
def test_masks_are_within_the_bound(which, dtype, activation, with_residual, mean):
    check(which, dtype, activation, with_residual, True, mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("which", [w for w in LAYERS if w != "scale"])
def test_half_parameters_have_float32_statistics(which, dtype):
    check(which, dtype, "relu", False, False, state=torch.bfloat16)


@pytest.mark.parametrize("which", LAYERS)
def test_parameters_in_other_types_are_taken(which):
    layer = randomize_(LAYERS[which][0]())
    for x_type, state in ((torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.half)):
        own, x = copy.deepcopy(layer).to(state), torch.randn(shape_of(which)).to(x_type).requires_grad_()
        found, expected = (backward_of(copy.deepcopy(own), x, name) for name in ("torch", "reference"))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            tolerance = 1e-5 if torch.half not in (a.dtype, state) else 2e-3
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def backward_of(layer, x, backend, **options):
    """The output, all gradients and the buffers, in one list."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with select.backend(backend):
        y = layer(leaf * 1, **options)
    grads = torch.autograd.grad(
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum(), [leaf, *layer.parameters()]
    )
    return [y.detach(), *grads, *layer.buffers()]


@pytest.mark.parametrize("which", MASKED)
def test_padding_may_hold_anything(which):
    layer, x = randomize_(LAYERS[which][0](activation="silu")).double(), torch.randn(shape_of(which)).double()
    mask = mask_of(x)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    where = ~mask[:, None] & (torch.rand(x.shape) < 0.5)
    x[where] = bad[torch.randint(3, (int(where.sum()),))]
    found, expected = (backward_of(copy.deepcopy(layer), x, name, mask=mask) for name in ("torch", "reference"))
    assert not x.isfinite().all()
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_that_counts_is_not_hidden(bad):
    x = torch.randn(4, 6, 5, 7)
    x[1, 2, 3, 4] = bad
    mask = torch.ones(4, 5, 7, dtype=torch.bool)
    layers = [nk.BatchNorm2d(6) for _ in range(2)]
    for layer, name in zip(layers, ("torch", "reference"), strict=True):
        with select.backend(name):
            y = layer(x, mask=mask)
        assert torch.equal(y.isnan().any((0, 2, 3)), torch.arange(6) == 2)
    for name, stored in layers[0].named_buffers():
        torch.testing.assert_close(stored, layers[1].get_buffer(name), equal_nan=True)


def test_an_example_without_a_counted_position_becomes_the_bias():
    layer, x = randomize_(nk.GroupNorm(3, 6)), torch.randn(4, 6, 5, 7)
    mask = torch.ones(4, 5, 7, dtype=torch.bool)
    mask[1] = False
    with select.backend("torch"):
        y = layer(x, mask=mask)
    torch.testing.assert_close(y[1], layer.bias.detach()[:, None, None].expand(6, 5, 7))


@pytest.mark.parametrize("which", MASKED)
def test_second_derivatives_of_masks(which):
    layer = randomize_(LAYERS[which][0](activation="tanh")).double()
    x = torch.randn(3, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 2, 3) < 0.8
    mask[:, 0] = True

    def run(x):
        with select.backend("torch"):
            return functional_call(layer, {k: v.clone() for k, v in layer.named_buffers()}, (x,), {"mask": mask})

    assert torch.autograd.gradcheck(run, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)


def test_masks_take_few_passes():
    layer, x = randomize_(nk.BatchNorm2d(6)), torch.randn(8, 6, 5, 7, requires_grad=True)
    mask, dy, counted = mask_of(x), torch.randn(8, 6, 5, 7), {}
    for name in ("torch", "reference"):
        with select.backend(name):
            counted[name] = measure(
                lambda: torch.autograd.grad(layer(x, mask=mask), [x, *layer.parameters()], dy), x.numel()
            )
    found = counted["torch"]
    assert found.passes < counted["reference"].passes / 2, found.operators
    assert found.bytes < counted["reference"].bytes / 3, found.operators


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nk.BatchNorm1d(4, affine="shift"),
        lambda: nk.GroupNorm(2, 4, affine="shift"),
        lambda: nk.InstanceNorm1d(4, affine="shift"),
    ],
    ids=["batch", "groups", "instances"],
)
def test_second_derivatives_with_a_bias_alone(build, training):
    """Torch's own are wrong there (2.13): nothing of the gradient of the bias comes back."""
    layer = randomize_(build()).double().train(training)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)

    def run(x, bias):
        state = {k: v.clone() for k, v in layer.named_buffers()} | {"bias": bias}
        with select.backend("torch"):
            return functional_call(layer, state, (x,))

    assert torch.autograd.gradgradcheck(run, (x, layer.bias.detach().requires_grad_()))


# ---- running statistics


def stored_of(dtype=torch.float32):
    return Moments(torch.randn(6).to(dtype), torch.rand(6).to(dtype) + 0.5, torch.tensor(3))


@pytest.mark.parametrize("momentum", [0.3, torch.tensor(0.3)], ids=["number", "tensor"])
def test_running_statistics_move_inside_the_operator(momentum):
    x, stored = torch.randn(8, 6, 5, 7), stored_of()
    twin = nn.BatchNorm2d(6, momentum=0.3)
    twin.running_mean.copy_(stored.mean)
    twin.running_var.copy_(stored.var)
    recipe = Recipe((0, 2, 3), 1e-5, None, True, (1, 6, 1, 1))
    expected = twin(x)
    with select.backend("torch"):
        traffic = measure(lambda: select.normalize_and_update_(x, recipe, stored, momentum), 6)
        assert torch.equal(stored.mean, twin.running_mean)
        assert torch.equal(stored.var, twin.running_var)
        assert stored.count == 4
        assert torch.equal(select.normalize_and_update_(x, recipe, stored, momentum), expected)
    assert traffic.operators.count("native_batch_norm") == 1
    assert not {"mul", "add", "lerp", "copy_"} & set(traffic.operators)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_of_another_type_are_left_to_the_caller(dtype):
    stored = stored_of(dtype)
    recipe = Recipe((0, 2, 3), 1e-5, None, True, (1, 6, 1, 1))
    with select.backend("torch"):
        assert select.normalize_and_update_(torch.randn(8, 6, 5, 7), recipe, stored, 0.1) is None
    assert stored.count == 3


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("which", ["batch", "rows", "positions"])
def test_running_statistics_are_torchs(which, momentum):
    layer = randomize_(LAYERS[which][0](momentum=momentum))
    twin = nn.BatchNorm1d(layer.running_mean.numel(), momentum=momentum)
    twin.load_state_dict({k: v.flatten() if v.dim() else v for k, v in layer.state_dict().items()})
    for _ in range(3):
        x = torch.randn(shape_of(which)) * 3 + 1
        with select.backend("torch"):
            layer(x)
        twin(x.flatten(1) if which != "batch" else x.flatten(2))
    for name, stored in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name).flatten(), stored.flatten(), rtol=1e-6, atol=1e-7)


def test_moments_of_every_kind():
    for shape, over, parameters, centred in [
        ((8, 6, 5, 7), (0, 2, 3), (1, 6, 1, 1), True),
        ((8, 6, 5, 7), (0,), (1, 6, 5, 7), True),
        ((8, 3, 2, 5, 7), (2, 3, 4), (1, 3, 2, 1, 1), True),
        ((8, 6, 5, 7), (2, 3), (1, 6, 1, 1), False),
        ((8, 6, 5, 7), (2, 3), None, True),
        ((8, 6, 5, 7), (3,), None, False),
    ]:
        x, recipe = torch.randn(shape) + 2, Recipe(over, 1e-5, None, centred, parameters)
        with select.backend("torch"):
            y, m = select.normalize(x, recipe)
        expected_y, expected = select.reference.normalize(x, None, None, None, None, recipe)
        torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(m.mean.double(), expected.mean.squeeze(over), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(m.var.double(), expected.var.squeeze(over), rtol=1e-5, atol=1e-6)
        assert m.count == expected.count
        assert not m.mean.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("over", [(0, 2, 3), (2, 3), (0,)])
def test_moments_alone(over, dtype):
    x = (torch.randn(8, 6, 5, 7, dtype=torch.float64) * 2 + 5).to(dtype)
    mask = mask_of(x)[:, None]
    for given in (None, mask):
        with select.backend("torch"):
            found = select.moments(x, over, given)
        with select.backend("reference"):
            expected = select.moments(x, over, given)
        assert found.mean.dtype == found.var.dtype == torch.float64  # as moments are on CPUs
        for a, b in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.as_tensor(found.count), torch.as_tensor(expected.count))


@pytest.mark.parametrize("mask", [None, torch.ones(0, 1, 5, dtype=torch.bool)], ids=["all", "mask"])
def test_moments_of_nothing_are_unknown(mask):
    """A rank without examples has some, and no warning comes with them."""
    found = {}
    for name in ("torch", "reference"):
        with select.backend(name):
            found[name] = select.moments(torch.randn(0, 6, 5), (0, 2), mask)
    assert found["torch"].mean.isnan().all()
    assert found["torch"].var.isnan().all()
    if mask is None:
        assert found["torch"].count == found["reference"].count == 0
    else:
        assert torch.equal(found["torch"].count, found["reference"].count)


def test_moments_have_a_gradient():
    x = torch.randn(8, 6, 5, 7, dtype=torch.float64, requires_grad=True)
    with select.backend("torch"):
        assert torch.autograd.gradcheck(lambda x: select.moments(x, (0, 2, 3))[:2], (x,), fast_mode=True)
        with pytest.raises(nk.BackendError, match="moments of a mask with a gradient"):
            select.moments(x, (0, 2, 3), mask_of(x)[:, None])
    assert select.moments(x, (0, 2, 3), mask_of(x)[:, None]).var.requires_grad


def test_stored_statistics_may_have_a_gradient():
    x = torch.randn(4, 6, 5, 7, dtype=torch.float64)
    mean, var = torch.randn(6).double().requires_grad_(), (torch.rand(6).double() + 0.5).requires_grad_()
    with select.backend("torch"):
        assert torch.autograd.gradcheck(lambda m, v: nk.functional.batch_norm(x, m, v), (mean, var), fast_mode=True)


# ---- in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
@pytest.mark.parametrize("activation", [None, "leaky_relu"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "rows"])
def test_in_place(layout, activation, affine, dtype):
    layers = [nk.BatchNorm2d(6, activation=activation, affine=affine, inplace=inplace) for inplace in (True, False)]
    randomize_(layers[0])
    with torch.no_grad():
        if layers[0].weight is not None:
            layers[0].weight.copy_(layers[0].weight.sign() * layers[0].weight.abs().clamp(min=0.2))
    layers[1].load_state_dict(layers[0].state_dict())
    x = (torch.randn(8, 6, 9, 9) * 2 + 1).to(dtype).contiguous(memory_format=layout)
    found, expected = (backward_of(layer, x, "torch") for layer in layers)
    tolerance = 3e-5 if dtype is torch.float32 else 0.06  # xhat is worked out from an output rounded to this type
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        most = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, most))


def test_in_place_keeps_the_output_alone():
    layer = nk.BatchNorm2d(6, activation="leaky_relu", inplace=True)
    x = torch.randn(8, 6, 14, 14, requires_grad=True) * 1
    memory, kept = x.data_ptr(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), select.backend("torch"):
        y = layer(x)
    assert y.data_ptr() == memory
    assert {t.data_ptr() for t in kept if t.numel() == x.numel()} == {memory}


def test_in_place_moves_running_statistics():
    stored, twin = stored_of(), nn.BatchNorm2d(6)
    twin.running_mean.copy_(stored.mean)
    twin.running_var.copy_(stored.var)
    x, recipe = torch.randn(8, 6, 5, 7), Recipe((0, 2, 3), 1e-5, None, True, (1, 6, 1, 1))
    expected = twin(x)
    with select.backend("torch"):
        y = select.normalize_and_update_(x, recipe, stored, 0.1, inplace=True)
    assert y is x
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(stored.mean, twin.running_mean)
    torch.testing.assert_close(stored.var, twin.running_var)


def test_where_too_little_is_left_in_the_output_the_ordinary_way_is_taken():
    layer, x = nk.BatchNorm2d(6, inplace=True), torch.randn(8, 6, 5, 7)
    nn.init.constant_(layer.weight[2], 0.0)
    before = x.clone()
    with select.backend("torch"):
        y = layer(x)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


# ---- what surrounds a call


@pytest.mark.parametrize("which", LAYERS)
def test_autocast_leaves_the_type_alone(which):
    layer, x = LAYERS[which][0](), torch.randn(shape_of(which)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), select.backend("torch"):
        assert layer(x).dtype == torch.bfloat16
        assert layer(x.float()).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("which", LAYERS)
def test_transforms(which, training):
    layer = randomize_(LAYERS[which][0](activation="relu")).double().train(training)
    xs = torch.randn(3, *shape_of(which), dtype=torch.float64)

    def run(x, r):
        buffers = {name: b.clone() for name, b in layer.named_buffers()}
        return functional_call(layer, buffers, (x,), {"residual": r})

    with select.backend("torch"):
        if not training:
            found = vmap(run)(xs, xs.cos())
            expected = torch.stack([run(x, x.cos()) for x in xs])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        _, tangent = torch.func.jvp(lambda x: run(x, x.cos()), (xs[0],), (xs[1],))
        gradient = torch.func.grad(lambda x: (run(x, x.cos()) * xs[2]).sum())(xs[0])
    torch.testing.assert_close((tangent * xs[2]).sum(), (gradient * xs[1]).sum(), rtol=1e-9, atol=1e-9)


def test_a_mask_inside_a_transform_is_refused_by_name_only():
    layer, x = nk.BatchNorm2d(6, track_running_stats=False), torch.randn(3, 4, 6, 5, 7)
    mask = mask_of(x[0])
    with select.backend("torch"), pytest.raises(nk.BackendError, match="a mask inside a transform"):
        vmap(lambda x: layer(x, mask=mask))(x)
    assert vmap(lambda x: layer(x, mask=mask))(x).shape == x.shape


def test_statistics_over_dimensions_that_no_operator_has():
    x, recipe = torch.randn(4, 6, 5, 7), Recipe((1, 3), 1e-5)
    assert fused.why_not(x, recipe) == "statistics over the dimensions (1, 3) of 4"
    with select.backend("torch"), pytest.raises(nk.BackendError, match=r"the dimensions \(1, 3\) of 4"):
        select.normalize(x, recipe)
    select.normalize(x, recipe)


@pytest.mark.parametrize("strides", [(4, 1, 4, 2), (2, 1, 4, 2), (1, 1, 1, 2), (4, 2, 2, 1)])
def test_a_group_norm_of_one_example_of_any_strides(strides):
    """Of a size of one the stride says nothing, but torch asks it whether maps are channels_last."""
    x = torch.randn(4).as_strided((1, 2, 1, 2), strides)
    weight, bias = torch.randn(2, 2)
    for dtype in (torch.float32, torch.bfloat16):
        with select.backend("torch"):
            found = nk.functional.group_norm(x.to(dtype), 1, weight, bias)
        expected = F.group_norm(x.to(dtype).contiguous(), 1, weight.to(dtype), bias.to(dtype))
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("which", ["groups", "instances", "last", "rms"])
def test_a_batch_of_no_examples(which):
    layer, x = LAYERS[which][0](activation="relu"), torch.randn(0, 6, 5, 7, requires_grad=True)
    with select.backend("torch"):
        y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def test_residuals_in_other_types_leave_the_type_of_the_output():
    layer, x = nk.BatchNorm2d(6, activation="relu"), torch.randn(4, 6, 5, 7).bfloat16()
    for dtype in (torch.float32, torch.float64, torch.half):
        residual = torch.randn(4, 6, 5, 7).to(dtype).requires_grad_()
        with select.backend("torch"):
            y = layer(x, residual=residual)
        y.float().sum().backward()
        assert (y.dtype, residual.grad.dtype) == (torch.bfloat16, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_others_hold_is_not_written_to(activation):
    layer, x, residual = nk.BatchNorm2d(6, activation=activation), *torch.randn(2, 4, 6, 5, 7)
    before = x.clone(), residual.clone()
    for training in (True, False):
        with select.backend("torch"), torch.no_grad():
            layer.train(training)(x, residual=residual)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


@pytest.mark.parametrize("which", ["batch", "groups", "last"])
def test_compiled_code_holds_torchs_operator_if_it_is_asked_for(which):
    layer, x = LAYERS[which][0](activation="relu"), torch.randn(shape_of(which))
    seen = []

    def backend(module, _):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    twin = copy.deepcopy(layer)
    with select.backend("torch"):
        y = torch.compile(layer, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(y, twin(x))
    assert any(f"{word}_norm" in target for target in seen for word in ("batch", "group", "layer"))
    for name, stored in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), stored)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", [{}, {"residual": torch.float64}], ids=["straight", "general"])
def test_parameters_alone_have_gradients_in_channels_last(dtype, extras):
    """Torch's own backward would end the process."""
    layer = randomize_(nk.GroupNorm(17, 34)).to(dtype)
    x = torch.randn(7, 34, 6, 2).to(dtype).to(memory_format=torch.channels_last)
    extras = {name: torch.randn(x.shape, dtype=own) for name, own in extras.items()}
    dy = torch.randn(x.shape)
    found = {}
    for name in ("torch", "reference"):
        with select.backend(name):
            y = layer(x, **extras)
            found[name] = torch.autograd.grad(y, [*layer.parameters()], dy.to(y.dtype))
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found["torch"], found["reference"], rtol=4 * unit, atol=84 * unit)  # of as many values
