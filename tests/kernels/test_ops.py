"""In graphs our operators stay whole, and give what they give outside, bit for bit: it is the same kernel."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

import normkit as nk
from normkit.kernels import core, reference, select
from normkit.kernels.reference import Recipe
from support.case import randomize_
from support.depth import thinned

pytest.importorskip("normkit._core", reason="normkit was built without its C++ core")

ops = torch.ops.normkit
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYERS = {
    "BatchNorm1d": (lambda **options: nk.BatchNorm1d(6, **options), (8, 6)),
    "BatchNorm2d": (lambda **options: nk.BatchNorm2d(6, **options), (4, 6, 5, 3)),
    "BatchNorm3d": (lambda **options: nk.BatchNorm3d(6, **options), (3, 6, 2, 5, 3)),
    "GroupNorm": (lambda **options: nk.GroupNorm(3, 6, **options), (4, 6, 5, 3)),
    "LayerNorm": (lambda **options: nk.LayerNorm((5, 6), **options), (4, 3, 5, 6)),
    "RMSNorm": (lambda **options: nk.RMSNorm(6, **options), (4, 3, 6)),
    "InstanceNorm2d": (
        lambda **options: nk.InstanceNorm2d(6, affine=True, track_running_stats=True, **options),
        (4, 6, 5, 3),
    ),
    "FrozenBatchNorm2d": (lambda **options: nk.FrozenBatchNorm2d(6, **options), (4, 6, 5, 3)),
}
FEW = thinned(LAYERS, {"BatchNorm2d", "LayerNorm", "FrozenBatchNorm2d"}.__contains__)
OWN = {"GroupNorm", "LayerNorm", "RMSNorm"}  # always an example's own statistics
CHANNELS_LAST = {name for name, (_, shape) in LAYERS.items() if len(shape) in LAST} - {"LayerNorm"}


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch.compiler.reset()


class Recorded:
    """A compiler that runs what it was given, and remembers it."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(fw_compiler=self._into(self.forward), bw_compiler=self._into(self.backward))

    def _into(self, graphs):
        from functorch.compile import make_boxed_func

        def compiler(module, _):
            graphs.append(module)
            return make_boxed_func(module.forward)

        return compiler


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def ours(module):
    return [name for name in targets(module) if name.startswith("normkit")]


def batch(shape, dtype=torch.float32, last=False):
    x = (torch.randn(shape, dtype=torch.float64) * 1.3 + 0.3).to(dtype)
    return x.contiguous(memory_format=LAST[x.dim()]) if last else x


def step(run, layer, x, residual, dy):
    """The output and all gradients of one step."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, residual)]
    y = run(leaves[0]) if residual is None else run(leaves[0], residual=leaves[1])
    layer.zero_grad()
    y.backward(dy)
    return [y.detach(), *(t.grad for t in (*leaves, *layer.parameters()) if t is not None)]


def assert_equal_steps(run, layer, twin, shape, dtype=torch.float32, last=False, residual=False, sizes=(None, None)):
    for size in sizes:
        sized = shape if size is None else (size, *shape[1:])
        x, dy = batch(sized, dtype, last), batch(sized, dtype, last)
        r = batch(sized, dtype, last) if residual else None
        for found, expected in zip(step(run, layer, x, r, dy), step(twin, twin, x, r, dy), strict=True):
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride()
            assert torch.equal(found, expected)
    for name, b in twin.named_buffers():
        assert torch.equal(layer.get_buffer(name), b), name


# ---- compiled


def rows():
    for name in LAYERS:
        for activation in (None, "relu", "leaky_relu"):
            for dtype in (torch.float32, torch.bfloat16):
                for last in (False, True)[: 1 + (name in CHANNELS_LAST)]:
                    for training in (True, False)[: 1 + (name not in OWN)]:
                        row = (name, activation, dtype, last, training)
                        words = (name, activation, str(dtype)[6:], "rows" if last else "", "" if training else "eval")
                        marks = () if row == (name, "relu", torch.float32, False, True) else pytest.mark.deep
                        yield pytest.param(*row, id="-".join(str(w) for w in words if w != ""), marks=marks)


@pytest.mark.parametrize(("name", "activation", "dtype", "last", "training"), list(rows()))
def test_compiled_is_eager_bit_for_bit(name, activation, dtype, last, training):
    build, shape = LAYERS[name]
    layer = randomize_(build(activation=activation)).to(dtype).train(training)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_equal_steps(compiled, layer, twin, shape, dtype, last, residual=activation != "leaky_relu")


@pytest.mark.parametrize("name", thinned(LAYERS, {"RMSNorm"}.__contains__))
def test_inductor_is_eager_bit_for_bit(name):
    build, shape = LAYERS[name]
    layer = randomize_(build(activation="relu"))
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True)
    assert_equal_steps(compiled, layer, twin, shape, last=name in CHANNELS_LAST, residual=True, sizes=[None] * 3)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_graphs_hold_one_operator_each(name, residual):
    build, shape = LAYERS[name]
    layer, recorded = build(activation="relu"), Recorded()
    step(
        torch.compile(layer, fullgraph=True, backend=recorded.backend), layer, batch(shape), batch(shape), batch(shape)
    )
    (forward,), (backward,) = recorded.forward, recorded.backward
    stored = "_stored" if name == "FrozenBatchNorm2d" else ""
    assert ours(forward) == [f"normkit.normalize{stored}.default"]
    assert ours(backward) == ["normkit.normalize_backward.default"]
    for module in (forward, backward):  # beside it, nothing works on all values
        size = batch(shape).numel()
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor) and value.numel() == size:
                assert str(node.target) in {"<built-in function getitem>", "aten.view.default", "aten.detach.default"}


@pytest.mark.parametrize("name", ["BatchNorm2d", "GroupNorm", "LayerNorm", "InstanceNorm2d"])
def test_dynamic_sizes_need_one_graph(name):
    build, shape = LAYERS[name]
    layer = randomize_(build(activation="relu"))
    twin, count = copy.deepcopy(layer), CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    assert_equal_steps(compiled, layer, twin, shape, sizes=(4, 9, 3))
    assert count.frame_count == 1


@pytest.mark.deep
def test_dynamic_sizes_in_inductor():
    build, shape = LAYERS["GroupNorm"]
    layer = randomize_(build(activation="relu"))
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    assert_equal_steps(compiled, layer, twin, shape, last=True, sizes=(4, 9))


def test_state_over_steps_of_a_model():
    model = randomize_(nn.Sequential(nn.Conv2d(3, 6, 3), nk.BatchNorm2d(6, activation="relu"), nk.GroupNorm(2, 6)))
    twin = copy.deepcopy(model)
    runs = [(torch.compile(model, fullgraph=True, backend="aot_eager"), model), (twin, twin)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for _, m in runs]
    for _ in range(4):
        x = torch.randn(4, 3, 8, 8)
        for (run, _), optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_statistics_that_the_graph_goes_on_to_write():
    """The backward of the first call needs what the second has replaced."""

    def twice(layer, x):
        layer.eval()
        y = layer(x)
        return y + layer.train()(2 * x)

    layer = randomize_(nk.BatchNorm2d(3, activation="leaky_relu"))
    twin, compiled = copy.deepcopy(layer), torch.compile(twice, fullgraph=True)
    for _ in range(2):
        x, dy = batch((4, 3, 5, 5)), batch((4, 3, 5, 5))
        found = step(lambda x: compiled(layer, x), layer, x, None, dy)
        expected = step(lambda x: twice(twin, x), twin, x, None, dy)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-7, atol=1e-7)


def test_the_reference_is_compiled_in_parts():
    layer, recorded = nk.BatchNorm2d(3, activation="relu"), Recorded()
    with select.backend("reference"):
        y = torch.compile(layer, fullgraph=True, backend=recorded.backend)(torch.randn(4, 3, 5, 5, requires_grad=True))
        y.sum().backward()
    (forward,), (backward,) = recorded.forward, recorded.backward
    assert ours(forward) == ours(backward) == []
    assert len(targets(forward)) > 10


PARTS = {
    "float64 and silu": lambda x: nk.functional.layer_norm(x.double(), 5, activation="silu").float(),
    "mask": lambda x: nk.functional.batch_norm(x, None, None, training=True, mask=x[:, 0] > -1),
    "torch.func": torch.func.grad(lambda x: nk.functional.layer_norm(x, 5).square().sum()),
    "forward mode": lambda x: torch.func.jvp(lambda t: nk.functional.layer_norm(t, 5), (x,), (x,))[1],
}


@pytest.mark.parametrize("what", PARTS)
def test_what_the_loops_cannot_do_is_compiled_in_parts(what):
    x, recorded = batch((4, 3, 5)), Recorded()
    found = torch.compile(PARTS[what], fullgraph=True, backend=recorded.backend)(x)
    assert all(ours(module) == [] for module in recorded.forward)
    torch.testing.assert_close(found, PARTS[what](x))


# ---- exported


def exported(name, training, backend, **options):
    build, shape = LAYERS[name]
    layer, x = randomize_(build(**options)).train(training), batch(shape, options.get("dtype", torch.float32))
    with select.backend(backend):
        return layer, torch.export.export(copy.deepcopy(layer), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FEW)
def test_exported_on_demand(name, training):
    layer, program = exported(name, training, "native", activation="relu")
    stored = name == "FrozenBatchNorm2d" or (not training and name not in OWN)
    assert ours(program.graph_module) == [f"normkit.normalize{'_stored' if stored else ''}.default"]
    module = program.module()
    assert_equal_steps(module, module, layer, LAYERS[name][1], sizes=(7, 4))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FEW)
def test_exported_without_being_asked_for_it_runs_anywhere(name, training):
    _, program = exported(name, training, "auto", activation="relu")
    assert ours(program.graph_module) == []
    _, program = exported(name, training, "auto")
    assert len([t for t in targets(program.graph_module) if "_norm" in t]) == 1  # torch's operator, whole


def test_exported_on_demand_it_is_whole_or_refused():
    with pytest.raises(nk.BackendError, match="were asked for and cannot run"):
        exported("BatchNorm2d", False, "native", activation="silu", dtype=torch.float64)


LOAD = """
import sys, torch, normkit
x, expected = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(x)
assert torch.equal(found, expected)
"""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export about itself
@pytest.mark.deep
def test_an_exported_program_is_loaded_elsewhere(tmp_path):
    layer, program = exported("BatchNorm2d", False, "native", activation="relu")
    x = batch(LAYERS["BatchNorm2d"][1])
    files = [tmp_path / "program.pt2", tmp_path / "tensors.pt"]
    torch.export.save(program, files[0])
    torch.save([x, layer(x).detach()], files[1])
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOAD, *files], check=True)


def test_a_program_that_could_read_beyond_its_parameters_is_not_made():
    layer = nk.BatchNorm2d(6).eval()
    sizes = ({1: torch.export.Dim("channels")},)
    with select.backend("native"), pytest.raises(Exception, match="6"):
        torch.export.export(layer, (batch((4, 6, 5, 3)),), dynamic_shapes=sizes)


# ---- the operators themselves


def arguments(shape=(4, 6, 5, 3), dtype=torch.float32, activation="relu", residual=True, last=False):
    x, r = batch(shape, dtype, last), batch(shape, dtype, last) if residual else None
    weight, bias = torch.randn(2, shape[1], dtype=torch.promote_types(dtype, torch.float32)).unbind()
    tensors = [t if t is None else t.detach().requires_grad_() for t in (x, weight, bias, r)]
    rank = len(shape)
    return tensors, Recipe((0, *range(2, rank)), 1e-3, activation, True, (1, shape[1], *(1,) * (rank - 2)))


SAMPLES = {
    "planes": {},
    "rows": {"last": True},
    "alone": {"residual": False, "activation": None},
    "bfloat16": {"dtype": torch.bfloat16, "activation": "leaky_relu"},
    "reference": {"dtype": torch.float64},
    "silu": {"activation": "silu"},
    "flat": {"shape": (8, 6), "activation": None},
}


@pytest.mark.parametrize("sample", thinned(SAMPLES, {"planes", "reference"}.__contains__))
def test_opcheck(sample):
    tensors, recipe = arguments(**SAMPLES[sample])
    torch.library.opcheck(ops.normalize.default, (*tensors, *recipe))
    stored = (torch.randn(6), torch.rand(6) + 0.5)
    torch.library.opcheck(ops.normalize_stored.default, (*tensors, *stored, *recipe))
    x, weight, bias, residual = (t if t is None else t.detach() for t in tensors)
    y, statistics = ops.normalize(x, weight, bias, residual, *recipe)
    kept = None if residual is None or recipe.activation is None else residual if recipe.activation == "silu" else y
    wants = [True, True, kept is not None]
    for used in (False, True):
        torch.library.opcheck(
            ops.normalize_backward.default, (y, x, weight, bias, kept, statistics, *recipe, used, wants)
        )


def strided(shape):
    return batch((*shape[:-1], 2 * shape[-1]))[..., ::2]


@pytest.mark.parametrize("stored", [False, True], ids=["batch", "stored"])
@pytest.mark.parametrize("why", ["reference", "no core", "float64 and silu", "strided", "strided residual"])
def test_where_the_loops_cannot_run_the_reference_does(why, stored, monkeypatch):
    options = {"float64 and silu": {"dtype": torch.float64, "activation": "silu"}}.get(why, {})
    tensors, recipe = arguments(**options)
    if why.startswith("strided"):
        where = 3 if "residual" in why else 0
        tensors[where] = strided(tensors[0].shape).requires_grad_()
    if why == "no core":
        monkeypatch.setattr(core, "WHY_NOT", "there is none")
    x, weight, bias, residual = tensors
    m = nk.Moments(torch.randn(6), torch.rand(6) + 0.5, 0)
    with select.backend("reference" if why == "reference" else "auto"):
        if stored:
            found = ops.normalize_stored(*tensors, m.mean, m.var, *recipe)[0]
            expected = reference.normalize_stored(x, recipe, m, weight, bias, residual)
        else:
            found = ops.normalize(*tensors, *recipe)[0]
            expected, _ = reference.normalize(x, recipe.view(weight), recipe.view(bias), residual, None, recipe)
        dy = torch.randn_like(found)
        gradients = [torch.autograd.grad(y, tensors, dy) for y in (found, expected)]
    assert found.stride() == torch.empty_like(x).stride()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("stored", [False, True], ids=["batch", "stored"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_a_second_derivative_is_made_of_operators(stored, residual):
    tensors, recipe = arguments((3, 6, 2), torch.float64, "leaky_relu", residual)
    given = [t for t in tensors if t is not None]
    m = (torch.randn(6), torch.rand(6) + 0.5) if stored else ()
    op = ops.normalize_stored if stored else ops.normalize

    def function(x, weight, bias, residual=None):
        return op(x, weight, bias, residual, *m, *recipe)[0]

    torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("where", [1, 2, 3])
def test_the_operators_check_at_their_door(where):
    tensors, recipe = arguments()
    tensors[where] = tensors[where][:-1]
    with pytest.raises(nk.ShapeError, match="normkit::normalize needs"):
        ops.normalize(*tensors, *recipe)


def test_statistics_are_not_differentiated():
    tensors, recipe = arguments()
    _, statistics = ops.normalize(*tensors, *recipe)
    assert not statistics.requires_grad


def test_nothing_but_the_input_is_kept_for_the_backward():
    layer, recorded = nk.BatchNorm2d(6, activation="relu"), Recorded()
    x = batch((4, 6, 5, 3)).requires_grad_()
    torch.compile(layer, fullgraph=True, backend=recorded.backend)(x).sum().backward()
    large = [n for n in recorded.backward[0].graph.nodes if n.op == "placeholder" and n.meta["val"].shape == x.shape]
    assert len(large) == 2  # it, and the output's gradient
