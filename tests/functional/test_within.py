"""What the norms within an example share: residuals, masks, half precision, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.kernels import select
from support.cases import randomize_
from support.depth import thinned
from support.padded import ragged
from support.refusal import refused

DOUBLE = torch.float64


RESIDUAL = {
    "layer": (lambda **o: nk.LayerNorm(6, **o), lambda: nn.LayerNorm(6), (3, 5, 6)),
    "rms": (lambda **o: nk.RMSNorm(6, **o), lambda: nn.RMSNorm(6), (3, 5, 6)),
    "group": (lambda **o: nk.GroupNorm(2, 6, **o), lambda: nn.GroupNorm(2, 6), (3, 6, 5)),
    "instance": (
        lambda **o: nk.InstanceNorm2d(6, affine=True, **o),
        lambda: nn.InstanceNorm2d(6, affine=True),
        (3, 6, 4, 5),
    ),
}


MASKED = {
    "group": lambda: nk.GroupNorm(2, 6, dtype=DOUBLE),
    "group-relu": lambda: nk.GroupNorm(3, 6, dtype=DOUBLE, activation="relu"),
    "instance": lambda: nk.InstanceNorm1d(6, affine=True, dtype=DOUBLE),
    "instance-tracked": lambda: nk.InstanceNorm1d(6, affine=True, track_running_stats=True, dtype=DOUBLE),
}


@pytest.mark.parametrize("activation", [None, "relu", "silu"], ids=str)
@pytest.mark.parametrize("name", RESIDUAL)
def test_activation_and_residual_equal_torchs_modules(name, activation):
    build, torchs, shape = RESIDUAL[name]
    ours = randomize_(build(activation=activation).to(DOUBLE))
    theirs = torchs().to(DOUBLE)
    theirs.load_state_dict(ours.state_dict())
    x, r = (torch.randn(shape, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    after = {None: nn.Identity(), "relu": nn.ReLU(), "silu": nn.SiLU()}[activation]
    y, z = ours(x, residual=r), after(theirs(x) + r)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, r, *ours.parameters()], dy)
    expected = torch.autograd.grad(z, [x, r, *theirs.parameters()], dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("padding", [0.0, 1e6, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_each_example_is_normalized_as_if_alone_and_unpadded(name, padding):
    layer = randomize_(MASKED[name]())
    x, mask, lengths = ragged()
    padded = x.masked_fill(~mask[:, None], padding)
    y = layer(padded, mask=mask)
    alone = copy.deepcopy(layer)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(y[i : i + 1, :, :length], alone(x[i : i + 1, :, :length]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", thinned([False, True], lambda compiled: not compiled), ids=["eager", "compiled"])
@pytest.mark.parametrize("padding", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_padding_reaches_no_gradient(name, padding, compiled):
    layer = randomize_(MASKED[name]())
    x, mask, lengths = ragged()
    leaf = x.masked_fill(~mask[:, None], padding).requires_grad_()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    y = run(leaf, mask=mask)
    assert y.isfinite().all()
    torch.where(mask[:, None], y, 0).square().sum().backward()
    alone, clean = copy.deepcopy(layer), x.detach().requires_grad_()
    alone.zero_grad()
    sum(alone(clean[i : i + 1, :, :n]).square().sum() for i, n in enumerate(lengths)).backward()
    torch.testing.assert_close(leaf.grad, clean.grad, rtol=1e-11, atol=1e-11)
    for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11)
    torch.compiler.reset()


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_all_is_no_mask(name):
    layer, x = randomize_(MASKED[name]()), torch.randn(4, 6, 9, dtype=DOUBLE)
    twin = copy.deepcopy(layer)
    for mask in (torch.ones(4, 9, dtype=torch.bool), torch.ones(4, 1, 9, dtype=torch.long)):
        torch.testing.assert_close(layer(x, mask=mask), twin(x), rtol=1e-14, atol=1e-14)
    for name, b in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [3e4, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_an_example_without_a_valid_position_is_finite_and_changes_no_other(name, padding, dtype):
    layer = randomize_(MASKED[name]()).to(dtype)
    twin = copy.deepcopy(layer)
    x, mask, _ = ragged()
    x = x.to(dtype)
    empty, without = mask.clone(), [0, 2, 3]
    empty[1] = False
    x[1] = padding
    x.requires_grad_()
    y = layer(x, mask=empty)
    y.float().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(y[without], twin(x.detach()[without], mask=mask[without]), rtol=0, atol=0)
    for name, b in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b, rtol=1e-6 if b.dtype != torch.half else 1e-3, atol=0)


@pytest.mark.parametrize("build", [lambda: nk.GroupNorm(2, 6), lambda: nk.InstanceNorm1d(6)], ids=["group", "instance"])
def test_masked_calls_compile_and_export(build):
    layer, (x, mask, _) = build(), ragged()
    x, expected = x.float(), build()(x.float(), mask=mask)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=mask), expected)
    program = torch.export.export(layer, (x,), {"mask": mask}).module()
    torch.testing.assert_close(program(x, mask=mask), expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda: nk.LayerNorm(64),
        lambda: nk.RMSNorm(64),
        lambda: nk.RMSNorm(64, eps=1e-6),
        lambda: nk.ScaleNorm(64),
        lambda: nk.GroupNorm(4, 64),
        lambda: nk.InstanceNorm1d(64),
    ],
    ids=["layer", "rms", "rms-eps", "scale", "group", "instance"],
)
def test_values_of_30000_do_not_overflow(build, dtype):
    shape = (3, 64, 64)
    layer = build().to(dtype)
    x = (3e4 * torch.randn(shape).sign() * (1 + 0.1 * torch.rand(shape))).to(dtype).requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    wide = x.detach().double().requires_grad_()
    z = copy.deepcopy(layer).double()(wide)
    z.backward(dy.double())
    assert y.dtype == dtype
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), z, rtol=0.51 * ulp, atol=1e-7)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=0.51 * ulp, atol=6e-8)


WRONG = {
    "layer": (lambda: nk.LayerNorm([4, 5]), (2, 3, 5), ["LayerNorm([4, 5]) needs (..., 4, 5)"]),
    "layer-rank": (lambda: nk.LayerNorm([4, 5]), (5,), ["LayerNorm([4, 5]) needs (..., 4, 5)"]),
    "layer-channels": (lambda: nk.LayerNorm(3), (2, 3, 8, 8), ["LayerNorm([3]) needs (..., 3)", "movedim(1, -1)"]),
    "rms": (lambda: nk.RMSNorm(5), (2, 4), ["RMSNorm([5]) needs (..., 5)"]),
    "scale": (lambda: nk.ScaleNorm(5), (2, 4), ["ScaleNorm(5) needs (..., 5)"]),
    "group": (lambda: nk.GroupNorm(2, 6), (2, 4, 3), ["GroupNorm(2, 6) needs (N, 6, L)", "number of channels"]),
    "group-rank": (lambda: nk.GroupNorm(2, 6), (6,), ["GroupNorm(2, 6) needs (N, 6)", "unsqueeze"]),
    "instance": (lambda: nk.InstanceNorm2d(5), (2, 4, 3, 3), ["InstanceNorm2d(5) needs (N, 5, H, W) or (5, H, W)"]),
    "instance-last": (lambda: nk.InstanceNorm2d(5), (2, 4, 4, 5), ["(N, 5, H, W)", "movedim"]),
    "instance-rank": (lambda: nk.InstanceNorm1d(5), (2, 5, 4, 3), ["(N, 5, L) or (5, L)", "number of dimensions"]),
    "filter-response": (
        lambda: nk.FilterResponseNorm2d(5),
        (2, 4, 3, 3),
        ["FilterResponseNorm2d(5) needs (N, 5, H, W)"],
    ),
    "local-response": (lambda: nk.LocalResponseNorm(5), (2, 4), ["local_response_norm needs (N, 4, L)"]),
    "group-of-one": (lambda: nk.GroupNorm(4, 4), (1, 4, 1, 1), ["more than 1 value per group", "fewer groups"]),
    "instance-of-one": (
        lambda: nk.InstanceNorm1d(4),
        (3, 4, 1),
        ["more than 1 value per example and channel", "GroupNorm"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_input_of_the_wrong_shape(name):
    build, shape, (needed, *hint) = WRONG[name]
    refused(lambda: build()(torch.randn(shape)), needed, f"{shape}", *hint)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda: nk.LayerNorm(4),
        lambda: nk.RMSNorm(4),
        lambda: nk.ScaleNorm(4),
        lambda: nk.GroupNorm(2, 4),
        lambda: nk.InstanceNorm2d(4),
        lambda: nk.FilterResponseNorm2d(4),
        lambda: nk.LocalResponseNorm(3),
    ],
    ids=["layer", "rms", "scale", "group", "instance", "filter-response", "local-response"],
)
def test_input_that_is_not_floating_point(build, dtype):
    x = torch.ones(2, 4, 4, 4, dtype=dtype)
    refused(lambda: build()(x), "floating point", str(dtype), "x.float()", error=TypeError)


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_options_that_cannot_be(eps):
    for build in (
        lambda **o: nk.LayerNorm(4, **o),
        lambda **o: nk.RMSNorm(4, **o),
        lambda **o: nk.ScaleNorm(4, **o),
        lambda **o: nk.GroupNorm(2, 4, **o),
        lambda **o: nk.InstanceNorm1d(4, **o),
        lambda **o: nk.functional.layer_norm(torch.ones(2, 4), 4, **o),
        lambda **o: nk.functional.rms_norm(torch.ones(2, 4), 4, **o),
        lambda **o: nk.functional.group_norm(torch.ones(2, 4, 3), 2, **o),
        lambda **o: nk.functional.instance_norm(torch.ones(2, 4, 3), **o),
    ):
        refused(lambda build=build: build(eps=eps), "eps must be positive", f"got {eps}")
        refused(lambda build=build: build(activation="rellu"), "'rellu'", 'Did you mean "relu"')
    refused(lambda: nk.FilterResponseNorm2d(4, eps=eps), "eps must be positive", f"got {eps}")


def test_other_options_that_cannot_be():
    refused(lambda: nk.LayerNorm([]), "LayerNorm needs a normalized_shape", "got []")
    refused(lambda: nk.RMSNorm([4, -1]), "RMSNorm needs a normalized_shape", "got [4, -1]")
    refused(lambda: nk.ScaleNorm(-1), "ScaleNorm needs a normalized_shape", "got -1")
    refused(lambda: nk.LocalResponseNorm(0), "size of 1 or more", "got 0")
    refused(lambda: nk.InstanceNorm1d(3, momentum=1.1), "momentum must lie in 0..1", "got 1.1")
    refused(lambda: nk.GroupNorm(1, 3, affine="gamma"), "affine must be", "got 'gamma'")
    refused(lambda: nk.InstanceNorm1d(3, affine="shift", bias=False), "a bias alone", "got bias=False")


def test_a_mask_or_residual_that_does_not_fit():
    x = torch.randn(3, 4, 5)
    for layer in (nk.GroupNorm(2, 4), nk.InstanceNorm1d(4), nk.InstanceNorm1d(4, track_running_stats=True).eval()):
        refused(lambda layer=layer: layer(x, mask=torch.ones(3, 6).bool()), "mask of shape (3, 5)", "got (3, 6)")
        refused(lambda layer=layer: layer(x, mask=torch.ones(3, 5)), "boolean mask", "float32", error=TypeError)
    for layer in (nk.GroupNorm(2, 4), nk.InstanceNorm1d(4), nk.LayerNorm(5), nk.RMSNorm(5), nk.ScaleNorm(5)):
        words = ["residual of the input's shape (3, 4, 5)", "got (1, 4, 5)"]
        refused(lambda layer=layer: layer(x, residual=x[:1]), *words)


def test_the_functions_refuse_tensors_that_do_not_fit():
    x, f = torch.randn(3, 4, 5), nk.functional
    refused(lambda: f.layer_norm(x, 5, torch.ones(4)), "layer_norm needs a weight of shape (5,)", "got (4,)")
    refused(lambda: f.layer_norm(x, [4, 5], None, torch.ones(5)), "a bias of shape (4, 5)", "got (5,)")
    refused(lambda: f.rms_norm(x, 5, torch.ones(1)), "rms_norm needs a weight of shape (5,)", "got (1,)")
    refused(lambda: f.group_norm(x, 2, torch.ones(2)), "group_norm needs a weight of shape (4,)", "got (2,)")
    refused(lambda: f.instance_norm(x, torch.ones(4)), "both running_mean and running_var")
    refused(lambda: f.instance_norm(x, use_input_stats=False), "use_input_stats; got neither")
    refused(lambda: f.instance_norm(x, torch.ones(5), torch.ones(5)), "running_mean of shape (4,)", "got (5,)")
    refused(lambda: f.instance_norm(x[0]), "instance_norm needs (N, 5, L)", "got (4, 5)")
    refused(lambda: f.group_norm(x[0, 0], 1), "group_norm needs (N, C)", "got (5,)")


def test_the_layers_are_torchs():
    for name in ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"):
        assert issubclass(getattr(nk, name), getattr(nn, name))
    assert issubclass(nk.LocalResponseNorm, nn.LocalResponseNorm)


@pytest.mark.parametrize(
    ("build", "operator"),
    [
        (lambda: nk.LayerNorm(6), "layer_norm"),
        (lambda: nk.RMSNorm(6), "rms_norm"),
        (lambda: nk.GroupNorm(2, 4), "group_norm"),
        (lambda: nk.InstanceNorm1d(4), "instance_norm"),
    ],
)
def test_exported_graphs_hold_torchs_operator(build, operator):
    program = torch.export.export(build(), (torch.randn(3, 4, 6),))
    assert f"aten.{operator}.default" in {str(node.target) for node in program.graph.nodes}


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 1), (2, 4, 1, 1)], ids=str)
def test_groups_of_one_value_as_in_torch(shape, backend):
    # Torch refuses these only where one value is all that a channel has.
    ours, theirs = nk.GroupNorm(4, 4), torch.nn.GroupNorm(4, 4)
    x, dy = torch.randn(2, *shape)
    found = []
    for layer in (ours, theirs):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([2.0, -1.0, 0.5, 3.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3, 0.4]))
        given = x.clone().requires_grad_()
        with select.backend(backend):
            y = layer(given)
        y.backward(dy)
        found.append([y, given.grad, layer.weight.grad, layer.bias.grad])
    # Torch scales x and its mean, not their difference, by 1 / sqrt(eps) = 316: what rounding leaves is not zero.
    left = 8 * torch.finfo(torch.float32).eps * 317 * x.abs().max().item() * 3 * (1 + dy.abs().sum().item())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=left)
    y, dx, dweight, _ = found[0]
    assert y.equal(ours.bias.reshape(1, 4, *[1] * (len(shape) - 2)).expand(shape))
    assert not dweight.any()
    assert dx.abs().max() <= 16 * torch.finfo(torch.float32).eps * 317 * 3 * dy.abs().max()  # the bound of a gradient


@pytest.mark.parametrize("shape", [(2, 0), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_normalized_shape_of_no_values_as_in_torch(name, shape):
    layer, theirs = getattr(nk, name)([0]), getattr(torch.nn, name)([0])
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == theirs(x).shape == x.grad.shape == shape
    assert layer.weight.grad.shape == (0,)
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    refused(lambda: getattr(nk, name)([3, -1]), "one or more sizes", "got [3, -1]")
    refused(lambda: getattr(nk, name)([]), "one or more sizes", "got []")


def test_an_empty_batch_gives_an_empty_output():
    for layer, shape in (
        (nk.LayerNorm(5), (0, 5)),
        (nk.RMSNorm(5), (0, 3, 5)),
        (nk.ScaleNorm(5), (0, 5)),
        (nk.GroupNorm(2, 4), (0, 4, 3)),
        (nk.InstanceNorm2d(4), (0, 4, 3, 3)),
        (nk.FilterResponseNorm2d(4), (0, 4, 3, 3)),
        (nk.LocalResponseNorm(3), (0, 4, 3)),
    ):
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
