"""The C++ loops agree with the reference on any shape, layout and type, and say so when they cannot run."""

import copy
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normkit as nk
from normkit.functional import batch_core
from normkit.kernels import core, select
from normkit.kernels.reference import Recipe
from support.bounds import Bound, Step, bounds_of
from support.case import randomize_
from support.instruction_sets import runnable, using
from support.rounding import FAR, LANES

_core = pytest.importorskip("normkit._core", reason="normkit was built without its C++ core")

BEST = core.instruction_set()
RUNNABLE = runnable()

ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=RUNNABLE)
def instruction_set(request):
    with using(request.param):
        yield request.param


@st.composite
def batches(draw):
    """A batch and all that comes with it: small and odd sizes, any layout, a mask, memory that begins anywhere."""
    rank = draw(st.integers(2, 5))
    sizes = st.integers(1, 9) if rank > 3 else st.integers(1, 40)
    shape = (draw(st.integers(2, 7)), draw(st.integers(1, 40)), *(draw(sizes) for _ in range(rank - 2)))
    dtype, activation = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(ACTIVATIONS))
    last = rank > 2 and draw(st.booleans())
    offset = draw(st.integers(0, 3))

    def tensor(mean=0.0):
        values = (torch.randn(shape, dtype=torch.float64) * 1.5 + mean).to(dtype)
        if last:
            values = values.movedim(1, -1).contiguous().movedim(-1, 1)
        memory = torch.empty(values.numel() + offset, dtype=dtype)[offset:]
        return memory.as_strided(values.shape, values.stride(), offset).copy_(values)

    x = tensor(draw(st.sampled_from([0.0, 3.0, 1e3])))
    residual = tensor() if draw(st.booleans()) else None
    affine = draw(st.sampled_from(["both", "scale", "shift", "none"]))
    channels = (1, shape[1], *[1] * (rank - 2))
    weight = torch.randn(channels) if affine in ("both", "scale") else None
    bias = torch.randn(channels) if affine in ("both", "shift") else None
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(shape[0], 1, *shape[2:]) < draw(st.sampled_from([0.3, 0.9]))
        mask[:2] = True
    return x, residual, weight, bias, mask, tensor(), Recipe((0, *range(2, rank)), 1e-3, activation)


def step(x, residual, weight, bias, mask, dy, recipe):
    """The output, the moments and all gradients, by the loops."""
    names = ("dx", "dweight", "dbias", "dresidual")
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    with select.backend("native"):
        y, m = select.normalize(leaves[0], recipe, weight=leaves[1], bias=leaves[2], residual=leaves[3], mask=mask)
    given = {name: t for name, t in zip(names, leaves, strict=True) if t is not None}
    return {"output": y.detach(), "mean": m.mean, "var": m.var} | dict(
        zip(given, torch.autograd.grad(y, list(given.values()), dy), strict=True)
    )


def assert_within_bounds(found, x, residual, weight, bias, mask, dy, recipe):
    """Every result as near to float64's as the bound asks."""
    over = recipe.over
    whole = Step(x, over, recipe.eps, weight, bias, residual, mask, recipe.activation, recipe.centred, dy=dy)
    bounds = bounds_of(whole)
    counted = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    wide = torch.where(counted, x.double(), 0)
    mean = wide.sum(over, keepdim=True) / counted.sum(over, keepdim=True)
    square = torch.where(counted, wide - mean, 0).square()
    var = square.sum(over, keepdim=True) / counted.sum(over, keepdim=True)
    bounds["mean"] = Bound("running_mean", mean.squeeze(over), wide.abs().amax(over))
    bounds["var"] = Bound("running_var", var.squeeze(over), square.amax(over))
    for name, result in found.items():
        if name in ("mean", "var"):  # kept in double, worked out in float
            result = result.float()
        bounds[name].check(result)


@given(case=batches())
def test_a_step_keeps_the_bound(instruction_set, case):
    assert_within_bounds(step(*case), *case)


@given(case=batches())
def test_float64_agrees_with_the_reference(instruction_set, case):
    x, residual, weight, bias, mask, dy, recipe = case
    x, residual, weight, bias, dy = (None if t is None else t.double() for t in (x, residual, weight, bias, dy))
    if recipe.activation not in (None, "relu", "leaky_relu"):
        recipe = recipe._replace(activation="leaky_relu")
    found = step(x, residual, weight, bias, mask, dy, recipe)
    with select.backend("reference"):
        expected, m = select.normalize(x, recipe, weight=weight, bias=bias, residual=residual, mask=mask)
    torch.testing.assert_close(found["output"], expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found["var"], m.var, rtol=1e-11, atol=1e-11)
    leaf = x.detach().requires_grad_()
    with select.backend("reference"):
        y, _ = select.normalize(leaf, recipe, weight=weight, bias=bias, residual=residual, mask=mask)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(found["dx"], dx, rtol=1e-10, atol=1e-10)


@given(case=batches())
def test_an_evaluation_keeps_the_bound(instruction_set, case):
    x, residual, weight, bias, _, _, recipe = case
    stored = nk.Moments(torch.randn(1, *weight_shape(x)), torch.rand(1, *weight_shape(x)) + 0.3, 1)
    with select.backend("native"):
        found = select.normalize_stored(x, recipe, stored, weight, bias, residual)
    activation, both = recipe.activation, (stored.mean, stored.var)
    whole = Step(x, recipe.over, recipe.eps, weight, bias, residual, None, activation, stored=both)
    bounds_of(whole)["output"].check(found)


def weight_shape(x):
    return (x.shape[1], *[1] * (x.dim() - 2))


@pytest.mark.parametrize(
    "shape", [(2, 1, 300, 400), (1, 3, 270_000), (3, 7, 30_000), (40_000, 5), (1, 1, 70_000)], ids=str
)
def test_few_channels_are_shared_out_over_their_positions(instruction_set, shape):
    x, dy = torch.randn(shape) * 2 + 5, torch.randn(shape)
    recipe = Recipe((0, *range(2, len(shape))), 1e-5, "relu")
    case = (x, None, None, None, None, dy, recipe)
    assert_within_bounds(step(*case), *case)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((3_300, 1_024), None),
        ((350, 1_024, 3, 3), 1),  # whose columns are divided by channels, between two vectors
    ],
)
def test_long_outputs_of_lines_are_written_past_the_cache(instruction_set, shape, groups):
    x, dy, weight, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with select.backend("native"):
        if groups is None:
            y = nk.functional.layer_norm(leaves[0], shape[1:], *leaves[1:])
        else:
            y = nk.functional.group_norm(leaves[0], groups, *leaves[1:])
    over, own = tuple(range(1, len(shape))), (1, shape[1], *[1] * (len(shape) - 2))
    bounds = bounds_of(Step(x, over, 1e-5, weight.reshape(own), bias.reshape(own), dy=dy))
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for name, result in zip(("output", "dx", "dweight", "dbias"), found, strict=True):
        bounds[name].check(result)


@pytest.mark.parametrize("shape", [(16, 32, 28, 28), (64, 5, 9, 9), (3000, 70), (2, 2, 300, 300)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "rows"])
def test_results_depend_on_neither_threads_nor_luck(shape, layout):
    x, dy = torch.randn(shape), torch.randn(shape)
    if len(shape) == 4:
        x, dy = (t.contiguous(memory_format=layout) for t in (x, dy))
    recipe = Recipe((0, *range(2, len(shape))), 1e-5, "relu")
    runs = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        runs.append(step(x, None, None, None, None, dy, recipe))
    torch.set_num_threads(1)
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 17])
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (8, 3)], ids=str)
def test_nonfinite_values_go_the_same_way(instruction_set, bad, where, shape):
    x = torch.randn(shape)
    x.flatten()[where] = bad
    with select.backend("native"):
        m = nk.functional.batch_moments(x)
    mean = x.double().mean((0, *range(2, len(shape))))
    torch.testing.assert_close(m.mean, mean, equal_nan=True)
    assert torch.equal(m.var.isfinite(), mean.isfinite())


def test_only_the_input_is_kept_for_the_backward():
    x = torch.randn(16, 8, 14, 14, requires_grad=True)
    layer, kept = nk.BatchNorm2d(8, activation="relu"), []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    large = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.numel() == x.numel()}
    assert sum(large.values()) == x.untyped_storage().nbytes()


def test_a_second_derivative_is_made_of_operators():
    x = torch.randn(6, 3, 4, requires_grad=True)
    layer = randomize_(nk.BatchNorm1d(3, activation="leaky_relu"))
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (dx,) = torch.autograd.grad(layer.double()(wide).square().sum(), wide, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_running_statistics_are_those_of_the_reference():
    x = torch.randn(6, 3, 4, 4) * 3 + 1
    layers = []
    for backend in ("auto", "reference"):
        torch.manual_seed(1)
        layers.append(randomize_(nk.BatchNorm2d(3, momentum=0.3)))
        with select.backend(backend):
            version = layers[-1].running_mean._version
            layers[-1](x)
            assert layers[-1].running_mean._version > version  # autograd sees the write
    for name, b in layers[0].named_buffers():
        torch.testing.assert_close(b, layers[1].get_buffer(name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip-update"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_statistics_of_every_type_move_inside_the_loops(dtype, nonfinite, momentum, monkeypatch):
    """A model that was moved to half precision as a whole: to the reference's value, or to its neighbour."""
    layer = randomize_(nk.BatchNorm2d(3, momentum=momentum, nonfinite=nonfinite, activation="relu")).to(dtype)
    twin = copy.deepcopy(layer)
    x = [(torch.randn(6, 3, 4, 4) * 3 + 1).to(dtype) for _ in range(3)]
    with select.backend("reference"):
        expected = [twin(batch) for batch in x] + [twin.eval()(x[0])]
    monkeypatch.setattr(batch_core, "update_", None)  # which nothing but the loops is to need
    with select.backend("native"), torch.no_grad():
        found = [layer(batch) for batch in x] + [layer.eval()(x[0])]
    unit = torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-12
    for name, stored in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), stored, rtol=3 * unit, atol=unit)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * unit, atol=8 * unit)


def test_statistics_that_overflow_half_precision_are_skipped_if_asked():
    layer = nk.BatchNorm1d(2, nonfinite="skip-update").half()
    layer(torch.tensor([[6e4, 1.0], [-6e4, 2.0]]).half())  # a variance of 7.2e9, of which float16 makes an infinity
    assert torch.equal(layer.running_var, torch.ones(2).half())
    assert layer.num_batches_tracked == 0


def test_inference_mode():
    with torch.inference_mode():
        layer = randomize_(nk.BatchNorm2d(3))  # its buffers have no version to count
        twin = torch.nn.BatchNorm2d(3)
        twin.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(layer(x), twin(x))
        torch.testing.assert_close(layer.running_var, twin.running_var)
        torch.testing.assert_close(layer.eval()(x), twin.eval()(x))


def test_a_gradient_that_shares_its_memory():
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    layer = randomize_(nk.BatchNorm2d(3, activation="relu"))
    (found,) = torch.autograd.grad(layer(x), x, torch.ones(()).expand(x.shape))
    (expected,) = torch.autograd.grad(layer(x), x, torch.ones(x.shape))
    assert torch.equal(found, expected)


def test_the_input_as_its_own_residual():
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    layer = randomize_(nk.BatchNorm2d(3, activation="relu", track_running_stats=False))
    found = torch.autograd.grad(layer(x, residual=x).square().sum(), x)
    expected = torch.autograd.grad(layer(x, residual=x.clone()).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_defaults_that_others_set_are_not_ours():
    """What the core writes to is float32 or float64 on this CPU, whatever `torch.empty` makes when it is not told."""
    x, dy = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    layer = randomize_(nk.BatchNorm2d(3, activation="relu"))
    expected = step_of(layer, x, dy)
    try:
        torch.set_default_dtype(torch.float64)
        found = step_of(layer, x, dy)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.device("meta"):
        found = step_of(layer, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def step_of(layer, x, dy):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(layer(leaf), [leaf, layer.weight, layer.bias], dy)


def test_an_input_whose_memory_was_freed_is_refused():
    x = torch.randn(4, 3, 5, 5)
    layer = nk.BatchNorm2d(3)
    before = layer.running_mean.clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="was its storage freed"):
        layer(x)
    assert torch.equal(layer.running_mean, before)


def test_an_input_changed_before_the_backward_is_noticed():
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    moved = x * 1
    y = nk.BatchNorm2d(3)(moved)
    moved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


REFUSED = {
    "torch.float64 with the activation silu": lambda x: (x.double(), Recipe((0, 2, 3), 1e-5, "silu")),
    "no way over these dimensions": lambda x: (x, Recipe((0, 3), 1e-5)),
    "meta": lambda x: (x.to("meta"), Recipe((0, 2, 3), 1e-5)),
}


@pytest.mark.parametrize("word", REFUSED)
def test_asked_for_by_name_it_runs_or_says_why_not(word):
    x, recipe = REFUSED[word](torch.randn(4, 3, 6, 6))
    with select.backend("native"), pytest.raises(nk.BackendError, match=f"cannot run: .*{word}.*auto"):
        select.normalize(x, recipe)
    y, _ = select.normalize(x, recipe)
    assert y.shape == x.shape


def test_operators_are_seen_by_who_watches_them():
    """A dispatch mode sees what flows through the layer; the loops would hide it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.overloadpacket.__name__,)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 3, 6, 6)
    layer = nk.BatchNorm2d(3)
    with Seen() as seen:
        layer(x)
    assert "native_batch_norm" in seen.names


def test_a_core_that_is_not_there_is_said_so(monkeypatch):
    assert select.status() == {"backend": "native", "instruction set": BEST, "threads": core.threads()}
    monkeypatch.setattr(core, "WHY_NOT", "normkit was built without its C++ core")
    assert select.status()["why"] == "normkit was built without its C++ core"
    layer = nk.BatchNorm2d(3)
    assert layer(torch.randn(4, 3, 6, 6)).isfinite().all()
    with select.backend("native"), pytest.raises(nk.BackendError, match="without its C"):
        layer(torch.randn(4, 3, 6, 6))


def test_unknown_backends_and_instruction_sets():
    with pytest.raises(nk.ArgumentError, match="backend must be one of"), select.backend("cuda"):
        pass
    with pytest.raises(ValueError, match="does not run neon"):
        _core.use_instruction_set("neon")


def header(type=0, activation=0, examples=1, positions=1, populations=1, sets=1):
    return struct.pack("=10qd", type, activation, 0, 1, populations, examples, 1, 1, positions, sets, 0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "more than 0 arguments"),
        ((1,), "expected bytes"),
        ((b"short",), "a header has 88 bytes; got 5"),
        ((header(type=7), 0, 0, 0, 8), "does not have"),
        ((header(activation=9), 0, 0, 0, 8), "does not have"),
        ((header(examples=-1), 0, 0, 0, 8), "must not be negative"),
        ((header(sets=0), 0, 0, 0, 8), "share the populations out evenly"),
        ((header(populations=4, sets=3), 0, 0, 0, 8), "share the populations out evenly"),
        ((header(populations=4, positions=2, sets=2), 8, 0, 0, 8, 0), "are for lines"),
        ((header(), 0, 0, 0, 0), "need memory"),
        ((header(), 0, 0, 0, 8, 0, 1), "needs 6 arguments; got 7"),
    ],
)
def test_the_core_checks_at_its_door(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        _core.moments(*arguments)


def test_the_core_adds_lines_alone():
    forward = (8, 0, 0, 8, 0, 8, 0, 0, 0, 0, 0, 0.0, 0, 1)
    with pytest.raises(ValueError, match="are for lines"):
        _core.forward_sum(header(positions=4), *forward, 8, 8)
    with pytest.raises(ValueError, match="a sum needs two tensors"):
        _core.forward_sum(header(examples=1, positions=1), *forward, 8, 0)
    backward = (8, 0, 0, 8, 0, 8, 8, 0, 0, 0)
    with pytest.raises(ValueError, match="are for lines"):
        _core.backward_sum(header(examples=2, positions=1), *backward, 0, 0, 0, 0.0, 0, 8)
    with pytest.raises(ValueError, match="are for lines"):
        _core.backward_sum(header(examples=1, positions=1), *backward, 0, 0, 1, 0.0, 0, 8)
    with pytest.raises(ValueError, match="has no memory"):
        _core.backward_sum(header(examples=1, positions=1), *backward, 0, 0, 0, 0.0, 0, 0)


def test_the_core_checks_the_type_of_stored_statistics():
    with pytest.raises(ValueError, match="a type that the core does not have"):
        _core.evaluate(header(), 8, 0, 0, 8, 0, 8, 8, 4, 0)


@pytest.mark.parametrize("values", [64, 384, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_line_does_not_depend_on_those_beside_it(values, dtype, instruction_set):
    """Also beside one whose first values are so far from the rest that it must be summed again, or not finite."""
    x = torch.randn(11, values).to(dtype)
    x[4, :16] += 1000
    x[7, -1] = torch.inf
    layer = randomize_(nk.LayerNorm(values))
    with select.backend("native"):
        together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())
    exact = layer.double()(x.double())
    torch.testing.assert_close(
        together[4].double(), exact[4], rtol=0, atol=10 * torch.finfo(dtype).eps * exact[4].abs().max().item()
    )


def test_a_first_value_far_from_all_others_costs_few_digits(instruction_set):
    """Values are summed about the mean of the first few, which lies almost as far off here as it may."""
    x = torch.randn(2, 5, 8, 9, 9) * 0.01
    x[:, 0, 0, 0, 0] = 1
    with select.backend("native"):
        y = nk.functional.group_norm(x, 1, eps=1e-12)
    exact = torch.nn.functional.group_norm(x.double(), 1, eps=1e-12)
    allowed = LANES * (1 + FAR + exact.abs())
    assert ((y - exact).abs() <= allowed).all()


@pytest.mark.parametrize("layer", [nk.GroupNorm(4, 8), nk.LayerNorm([8, 6, 5]), nk.RMSNorm([5]), nk.BatchNorm2d(8)])
@pytest.mark.parametrize("examples", [3, 6000])
def test_without_a_gradient_the_bits_are_the_same(layer, examples, instruction_set):
    """Small or large, where the output is written past the cache only if a backward follows."""
    x = torch.randn(examples, 8, 6, 5)
    with select.backend("native"):
        first, second = randomize_(layer), copy.deepcopy(layer)
        with torch.no_grad():
            plain = first(x)
        with_gradient = second(x.requires_grad_())
    assert torch.equal(plain, with_gradient)
    assert not plain.requires_grad
    assert with_gradient.requires_grad
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize("is_stored", [False, True], ids=["own", "stored"])
def test_evaluated_with_a_gradient_or_without(is_stored, instruction_set):
    layer, x = randomize_(nk.BatchNorm2d(8, track_running_stats=is_stored)).eval(), torch.randn(6000, 8, 6, 5)
    with select.backend("native"):
        with torch.no_grad():
            plain = layer(x)
        assert torch.equal(plain, layer(x.requires_grad_()))


@pytest.mark.parametrize("parts", ["both", "weight", "bias"])
@pytest.mark.parametrize("lines", [1, 2, 64, 65])
def test_parameters_of_few_and_of_many_long_lines(instruction_set, lines, parts):
    """Where the lines are few, their sums go straight to where they are wanted."""
    layer, x = randomize_(nk.LayerNorm(9001)), torch.randn(lines, 9001)
    layer.weight.requires_grad_(parts != "bias")
    layer.bias.requires_grad_(parts != "weight")
    twin = copy.deepcopy(layer).double()
    dy = torch.randn_like(x)
    with select.backend("native"):
        layer(x).backward(dy)
    with select.backend("reference"):
        twin(x.double()).backward(dy.double())
    for name, found in layer.named_parameters():
        expected = twin.get_parameter(name).grad
        assert (found.grad is None) == (parts not in ("both", name))
        if expected is not None:
            torch.testing.assert_close(found.grad.double(), expected, rtol=1e-5, atol=1e-5)
