"""Any activation in any layer that takes one: what the loops do not fuse runs after them, and everything else holds."""

import copy
import inspect
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.activations import parted
from support.cases import CASES, randomize_, taking_part
from support.depth import thinned
from support.refusal import refused, refused_untouched


def bend(z):
    """A function of the user's; at module level, so that it can be pickled."""
    return z.sin() + 0.1 * z


def takes_activation(case):
    return "activation" in inspect.signature(type(case.build())).parameters


# A row of each class that takes an activation, without the one it may have in the table.
CLASSES = {case.name: case for case in reversed(CASES) if takes_activation(case)}
ACTIVATIONS = {
    "relu6": ({"activation": "relu6"}, F.relu6),
    "hardswish": ({"activation": "hardswish"}, F.hardswish),
    "mish": ({"activation": "mish"}, F.mish),
    "elu": ({"activation": "elu"}, F.elu),
    "softplus": ({"activation": "softplus"}, F.softplus),
    "gelu_tanh": ({"activation": "gelu_tanh"}, partial(F.gelu, approximate="tanh")),
    "slope": ({"activation": "leaky_relu", "negative_slope": 0.3}, partial(F.leaky_relu, negative_slope=0.3)),
    "function": ({"activation": bend}, bend),
    "module": ({"activation": nn.ELU(0.5)}, partial(F.elu, alpha=0.5)),
    "parameters": ({"activation": nn.PReLU(init=0.4)}, partial(F.prelu, weight=torch.tensor([0.4]))),
}
OF_A_NAME, OF_A_MODULE = "hardswish", "parameters"


def pair(case, which, dtype=torch.float64, training=True):
    """A layer with the activation, the same without any, and the function that makes up the difference."""
    bare = case.layer(dtype, training)
    bare.activation = None
    layer, (options, function) = copy.deepcopy(bare), ACTIVATIONS[which]
    layer.activation = copy.deepcopy(options["activation"])
    if "negative_slope" in options:
        layer.negative_slope = options["negative_slope"]
    if isinstance(function, partial) and "weight" in function.keywords:
        function = partial(F.prelu, weight=function.keywords["weight"].to(dtype))
    return layer.to(dtype), bare, function


def rows():
    """Every class with one activation of each kind, and BatchNorm2d with all of them."""
    for case in CLASSES.values():
        for which in ACTIVATIONS:
            if case.name == "BatchNorm2d" or which in (OF_A_NAME, OF_A_MODULE):
                yield pytest.param(case, which, id=f"{case.name}-{which}")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("case", "which"), list(rows()))
def test_it_follows_the_norm(case, which, training):
    layer, bare, function = pair(case, which, training=training)
    assert not {key for key in layer.state_dict() if not key.startswith("activation.")} ^ set(bare.state_dict())
    x = case.input(torch.float64).requires_grad_()
    twin_x = x.detach().clone().requires_grad_()
    y, z = layer(x), function(bare(twin_x))
    torch.testing.assert_close(y, z, rtol=1e-14, atol=1e-14)
    dy = torch.randn_like(y)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(x.grad, twin_x.grad, rtol=1e-12, atol=1e-12)
    for name, b in bare.named_buffers():
        assert torch.equal(layer.get_buffer(name), b)
    for p in taking_part(layer).values():
        assert p.grad is not None


@pytest.mark.parametrize("which", ACTIVATIONS)
def test_a_constructor_takes_it(which):
    options, function = ACTIVATIONS[which]
    layer = nk.BatchNorm2d(5, **options)
    x = torch.randn(4, 5, 6, 7)
    torch.testing.assert_close(layer.eval()(x), function(nk.BatchNorm2d(5).eval()(x)))
    assert layer.activation is options["activation"]


@pytest.mark.parametrize("which", ACTIVATIONS)
def test_the_residual_comes_before_it(which):
    layer, bare, function = pair(CLASSES["BatchNorm2d"], which)
    x, r = (torch.randn(4, 5, 6, 7, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(layer(x, residual=r), function(bare(x, residual=r)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("which", [OF_A_NAME, OF_A_MODULE, "function", "slope"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(which, duplicate):
    layer, *_ = pair(CLASSES["GroupNorm"], which)
    twin, x = duplicate(layer), CLASSES["GroupNorm"].input(torch.float64)
    assert torch.equal(twin(x), layer(x))
    assert repr(twin) == repr(layer)
    assert twin.state_dict().keys() == layer.state_dict().keys()


def test_it_prints():
    assert "activation=hardswish)" in repr(nk.LayerNorm(3, activation="hardswish"))
    assert "activation=leaky_relu, negative_slope=0.3" in repr(
        nk.FrozenBatchNorm2d(3, activation="leaky_relu", negative_slope=0.3)
    )
    assert "activation=bend" in repr(nk.ScaleNorm(3, activation=bend))
    assert "(activation): PReLU" in repr(nk.BatchNorm2d(3, activation=nn.PReLU()))


def test_state_of_a_module_is_the_layers():
    layer = nk.BatchNorm2d(3, activation=nn.PReLU(3))
    assert set(layer.state_dict()) == {*nn.BatchNorm2d(3).state_dict(), "activation.weight"}
    assert [name for name, _ in layer.named_modules()] == ["", "activation"]
    assert layer.double().activation.weight.dtype is torch.float64
    assert not layer.eval().activation.training


def test_a_layer_pickled_before_there_were_others_still_loads():
    """Its dictionary has the name alone."""
    layer = randomize_(nk.BatchNorm2d(5, activation="leaky_relu"))
    x = torch.randn(4, 5, 6, 7)
    old = copy.deepcopy(layer)
    for name in ("_fused", "_runs_after", "negative_slope"):
        del vars(old)[name]
    loaded = pickle.loads(pickle.dumps(old))
    assert "_fused" not in vars(loaded)
    assert torch.equal(loaded(x), layer(x))
    assert torch.equal(loaded.eval()(x), layer.eval()(x))
    assert repr(loaded) == repr(layer)
    assert nk.describe(loaded) == nk.describe(layer)


def test_another_activation_takes_effect_at_once():
    layer, x = randomize_(nk.BatchNorm2d(5, activation="relu")).eval(), torch.randn(4, 5, 6, 7)
    plain = copy.deepcopy(layer)
    plain.activation = None
    for activation in (nn.PReLU(), "mish", torch.sin, "gelu", None, nn.Tanh(), nn.Sigmoid(), "tanh"):
        layer.activation = activation
        assert layer.activation is activation
        expected = plain(x) if activation is None else parted(activation).apply(plain(x))
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
        assert [name for name, _ in layer.named_children() if name != "own_function"] == (
            ["activation"] if isinstance(activation, nn.Module) else []
        )
    layer.activation, layer.negative_slope = "leaky_relu", 0.2
    torch.testing.assert_close(layer(x), F.leaky_relu(plain(x), 0.2), rtol=1e-5, atol=1e-6)
    layer.activation = "relu"
    assert layer.negative_slope == 0.01
    refused_untouched(layer, lambda: setattr(layer, "activation", "rely"), "Did you mean")
    refused_untouched(layer, lambda: setattr(layer, "negative_slope", 0.3), "that of activation")
    assert layer.activation == "relu"
    assert torch.equal(layer(x), F.relu(plain(x)))


@pytest.mark.parametrize("activation", ["relu6", nn.PReLU(), bend], ids=["name", "module", "function"])
def test_in_place_needs_one_that_can_be_undone(activation):
    refused(
        lambda: nk.BatchNorm2d(3, activation=activation, inplace=True), "can be undone", '"leaky_relu" or None; got'
    )
    refused(lambda: nk.BatchNorm2d(3, activation="leaky_relu", negative_slope=0.2, inplace=True), "slope of 0.2")


def test_the_slope_is_saved_with_a_weight_of_its_own():
    """torch.save of a whole layer, and of its state."""
    layer = nk.BatchNorm2d(3, activation=nn.PReLU(3))
    file = io.BytesIO()
    torch.save(randomize_(layer).state_dict(), file)
    file.seek(0)
    other = nk.BatchNorm2d(3, activation=nn.PReLU(3))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.activation.weight, layer.activation.weight)


def test_autocast():
    layer, x = nk.BatchNorm2d(5, activation="hardswish").eval(), torch.randn(4, 5, 6, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16())
        z = F.hardswish(nk.BatchNorm2d(5).eval()(x.bfloat16()))
    assert torch.equal(y, z)


@pytest.mark.parametrize("which", ["mish", OF_A_MODULE])
def test_second_derivatives(which):
    layer, *_ = pair(CLASSES["BatchNorm1d"], which)
    layer.eval()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("which", thinned(ACTIVATIONS, [OF_A_MODULE].__contains__))
def test_export_and_fx(which):
    case = CLASSES["BatchNorm2d"]
    layer, *_ = pair(case, which, torch.float32, training=False)
    x = case.input()
    program = torch.export.export(nn.Sequential(copy.deepcopy(layer)), (x,)).module()
    assert not [node for node in program.graph.nodes if str(node.target).startswith("normkit")]
    torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-5)
    traced = torch.fx.symbolic_trace(nn.Sequential(copy.deepcopy(layer)))
    assert torch.equal(traced(x), layer(x))
    recorded = torch.jit.trace(nn.Sequential(layer), x)
    torch.testing.assert_close(recorded(x), layer(x), rtol=1e-5, atol=1e-5)


def compiled_rows():
    families = {case.name.rstrip("123d"): case for case in CLASSES.values()}
    for case in families.values():
        for which in (OF_A_NAME, OF_A_MODULE, "function"):
            is_ordinary = case.name == "LayerNorm" and which == OF_A_MODULE
            marks = () if is_ordinary else pytest.mark.deep
            yield pytest.param(case, which, id=f"{case.name}-{which}", marks=marks)


@pytest.mark.parametrize(("case", "which"), list(compiled_rows()))
def test_compiled_whole(case, which):
    layer, *_ = pair(case, which, torch.float32)
    twin, x = copy.deepcopy(layer), case.input()
    try:
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.compiler.reset()


F_CALLS = {
    "batch_norm": lambda x, **o: nk.functional.batch_norm(x, None, None, training=True, **o),
    "batch_norm_update": lambda x, **o: nk.functional.batch_norm_update(
        x, nk.Moments(torch.zeros(5), torch.ones(5), 0), **o
    )[0],
    "layer_norm": lambda x, **o: nk.functional.layer_norm(x, 7, **o),
    "rms_norm": lambda x, **o: nk.functional.rms_norm(x, 7, **o),
    "group_norm": lambda x, **o: nk.functional.group_norm(x, 5, **o),
    "instance_norm": lambda x, **o: nk.functional.instance_norm(x, **o),
}


@pytest.mark.parametrize("which", ["gelu_tanh", "slope", "function", "module"])
@pytest.mark.parametrize("call", F_CALLS)
def test_functions_take_it_too(call, which):
    options, function = ACTIVATIONS[which]
    x, r = torch.randn(4, 5, 7), torch.randn(4, 5, 7)
    torch.testing.assert_close(F_CALLS[call](x, **options), function(F_CALLS[call](x)))
    torch.testing.assert_close(F_CALLS[call](x, residual=r, **options), function(F_CALLS[call](x, residual=r)))


def test_stored_statistics_in_functions():
    x, stat = torch.randn(4, 5, 7), torch.rand(5) + 0.5
    for call in (
        lambda **o: nk.functional.batch_norm(x, stat, stat, **o),
        lambda **o: nk.functional.instance_norm(x, stat, stat, use_input_stats=False, **o),
        lambda **o: nk.functional.batch_norm(x, stat.clone(), stat.clone(), training=True, **o),
    ):
        torch.testing.assert_close(call(activation="mish"), F.mish(call()))
