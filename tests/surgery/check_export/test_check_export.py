"""The export gate: an export that is the model passes, and each way of not being it is found."""

import copy
import logging
import sys

import onnx
import pytest
import torch
from torch import nn
from torch.export import export

import normkit as nk
from normkit.errors import ArgumentError, MissingExtraError
from normkit.surgery.check_export import check_export
from normkit.surgery.check_export.onnx import OnnxError
from normkit.surgery.parity import TOLERANCES, ExampleError
from support.depth import thinned

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def randomize_(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model


class Net(nn.Module):
    """A norm that exporters fold, one that they cannot, and norms within an example."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn1 = norm(4, eps=2e-3, momentum=0.3)
        self.bn2 = norm(4, eps=3e-4, momentum=0.2)
        self.group = nn.GroupNorm(2, 4, eps=4e-3)
        self.layer = nn.LayerNorm(6, eps=5e-3)
        self.fc = nn.Linear(6, 2)
        randomize_(self)

    def forward(self, x):
        y = self.bn2(torch.relu(self.bn1(self.conv(x))))
        return self.fc(self.layer(self.group(y)))


def image(n=4):
    return torch.randn(n, 3, 8, 8)


def to_onnx(model, x, path, dynamo, **options):
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False, **options)
    return path


def codes(check):
    return [(finding.code, finding.layer) for finding in check.findings]


def state_and_modes(model):
    return (
        {key: value.clone() for key, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
    )


def assert_as_before(model, before):
    state, modes, wanted = before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted


NORMS = pytest.mark.parametrize(
    "norm", thinned([nn.BatchNorm2d, nk.BatchNorm2d, nk.FrozenBatchNorm2d], {nk.BatchNorm2d}.__contains__)
)


@NORMS
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_faithful_program_passes(norm, decomposed):
    model, x = Net(norm).double().eval(), image().double()  # norms after norms make much of a rounding
    program = export(model, (x,))
    program = program.run_decompositions({}) if decomposed else program
    model.train()  # its mode does not matter
    before = state_and_modes(model)
    check = check_export(program, model, x)
    assert check.ok, check
    assert check.parity.max_rel < 1e-12
    assert not check.skipped
    assert_as_before(model, before)


@NORMS
@pytest.mark.parametrize("dynamo", thinned([True, False], lambda dynamo: not dynamo), ids=["dynamo", "torchscript"])
def test_a_faithful_onnx_file_passes(norm, dynamo, tmp_path):
    model, x = Net(norm).eval(), image()
    check = check_export(to_onnx(model, x, tmp_path / "net.onnx", dynamo), model, x)
    assert check.ok, check
    assert check.parity.max_rel < 1e-5
    if dynamo:  # this exporter folds the norm after the convolution
        assert [change.layer for change in check.skipped] == ["bn1"]
        assert "folded" in check.skipped[0].why


def test_a_model_proto_is_taken_as_it_is(tmp_path):
    model, x = Net().eval(), image()
    proto = onnx.load(to_onnx(model, x, tmp_path / "net.onnx", dynamo=False))
    assert check_export(proto, model, x).ok
    assert check_export(torch.onnx.export(model, (x,), dynamo=True, verbose=False), model, x).ok


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    "norm",
    thinned(
        [nn.BatchNorm2d, nk.BatchNorm2d, nk.GhostBatchNorm2d, nk.BatchRenorm2d],
        {nn.BatchNorm2d, nk.GhostBatchNorm2d}.__contains__,
    ),
)
def test_a_program_in_training_mode_is_found(norm, decomposed):
    model, x = Net(norm), image()
    program = export(copy.deepcopy(model).train(), (x,))
    program = program.run_decompositions({}) if decomposed else program
    held = {key: value.clone() for key, value in program.state_dict.items()}
    check = check_export(program, model.eval(), x)
    assert not check.ok
    assert codes(check) == [("NK501", "bn1"), ("NK501", "bn2"), ("NK504", None)]
    assert check.findings[0].severity == "error"
    assert "eval()" in check.findings[0].remedy
    assert check.findings[-1].evidence["max_rel"] == check.parity.max_rel > 1e-2
    assert all(torch.equal(value, held[key]) for key, value in program.state_dict.items())  # though it ran


def test_a_program_that_shares_the_models_tensors_leaves_them(tmp_path):
    model, x = Net().train(), image()
    program = export(model, (x,))
    assert program.state_dict["bn1.running_mean"].data_ptr() == model.bn1.running_mean.data_ptr()
    before = state_and_modes(model)
    assert not check_export(program, model, x).ok
    assert_as_before(model, before)


def test_an_onnx_file_in_training_mode_is_found(tmp_path):
    model, x = Net(), image()
    mode = torch.onnx.TrainingMode.PRESERVE
    path = to_onnx(copy.deepcopy(model).train(), x, tmp_path / "net.onnx", dynamo=False, training=mode)
    check = check_export(path, model.eval(), x)
    assert codes(check)[:2] == [("NK501", "bn1"), ("NK501", "bn2")]


@pytest.mark.parametrize("form", thinned(["program", "dynamo", "torchscript"], lambda form: form != "dynamo"))
def test_another_eps_or_momentum_is_found(form, tmp_path):
    model, x = Net().eval(), image()
    other = copy.deepcopy(model)
    other.bn2.eps, other.bn2.momentum, other.layer.eps, other.group.eps = 0.25, 0.01, 1e-5, 1e-3
    if form == "program":
        check = check_export(export(other, (x,)), model, x)
    else:
        check = check_export(to_onnx(other, x, tmp_path / "net.onnx", form == "dynamo"), model, x)
    drift = {f.layer: f.evidence for f in check.findings if f.code == "NK502"}
    assert {layer: list(evidence) for layer, evidence in drift.items()} == {
        "bn2": ["eps", "momentum"],
        "group": ["eps"],
        "layer": ["eps"],
    }
    assert drift["bn2"]["eps"] == pytest.approx((0.25, 3e-4))
    assert drift["bn2"]["momentum"] == pytest.approx((0.01, 0.2))
    assert "eps is 0.25 in the exported model, 0.0003 in the model" in check.findings[0].message
    assert codes(check)[-1] == ("NK504", None)


@pytest.mark.parametrize("form", thinned(["program", "dynamo"], lambda form: form != "dynamo"))
def test_other_weights_are_found(form, tmp_path):
    model, x = Net().eval(), image()
    stale = Net().eval()
    program = export(stale, (x,)) if form == "program" else to_onnx(stale, x, tmp_path / "net.onnx", dynamo=True)
    check = check_export(program, model, x)
    assert codes(check) == [("NK504", None)]
    with torch.no_grad():
        expected, got = model(x).double(), stale(x).double()
    gap = (expected - got).abs().max()
    assert check.parity.max_abs == pytest.approx(gap.item(), rel=1e-3)
    assert check.parity.max_rel == pytest.approx((gap / expected.abs().max()).item(), rel=1e-3)
    assert check.findings[0].evidence["tolerance"] == TOLERANCES[torch.float32]
    assert check_export(program, model, x, rtol=1e3).ok


def test_a_norm_that_stores_nothing_is_told_what_helps():
    model, x = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval(), torch.randn(6, 5)
    check = check_export(export(model, (x,)), model, x)
    assert codes(check) == [("NK501", "1")]
    assert "stores no statistics" in check.findings[0].remedy
    within = nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.GroupNorm(1, 3)).eval()
    assert check_export(export(within, (torch.randn(2, 3, 4),)), within, torch.randn(2, 3, 4)).ok


def test_an_instance_norm_with_stored_statistics():
    x = torch.randn(2, 3, 7)
    model = randomize_(nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True, momentum=0.4)))
    assert check_export(export(copy.deepcopy(model).eval(), (x,)), model, x).ok
    check = check_export(export(copy.deepcopy(model).train(), (x,)), model, x)
    assert codes(check) == [("NK501", "0"), ("NK504", None)]


def test_norms_in_branches_of_onnx():
    """A BatchNormalization in training mode inside an If, built by hand."""
    helper = onnx.helper
    floats = onnx.TensorProto.FLOAT
    names = ["weight", "bias", "running_mean", "running_var"]
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=0.25, training_mode=1)
    branches = [
        helper.make_graph([inner], name, [], [helper.make_tensor_value_info("y", floats, [4, 3])])
        for name, inner in (("yes", node), ("no", helper.make_node("Identity", ["x"], ["y"])))
    ]
    choice = helper.make_node("If", ["which"], ["out"], then_branch=branches[0], else_branch=branches[1])
    model = randomize_(nn.BatchNorm1d(3, eps=0.125)).eval()
    held = [onnx.numpy_helper.from_array(getattr(model, name).detach().numpy(), name) for name in names]
    graph = helper.make_graph(
        [choice],
        "chosen",
        [
            helper.make_tensor_value_info("x", floats, [4, 3]),
            helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("out", floats, [4, 3])],
        held,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = torch.randn(4, 3)
    check = check_export(proto, model, x, forward=lambda m, x: m(x) if m is model else m(x, torch.tensor(True)))
    assert codes(check)[:2] == [("NK501", ""), ("NK502", "")]


class BatchStatistics(nn.Module):
    """Normalizes with the batch's statistics, in operators that no exporter knows for a norm."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


def test_dependence_on_the_batch_is_found_by_running():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).eval()
    other = nn.Sequential(copy.deepcopy(model[0]), BatchStatistics())
    x = torch.randn(6, 5)
    check = check_export(export(other, (x,)), randomize_(model), x)
    assert codes(check) == [("NK501", None), ("NK504", None)]
    assert "others in its batch" in check.findings[0].message
    # A difference that has nothing to do with the batch is only a difference.
    assert codes(check_export(export(copy.deepcopy(model[0]), (x,)), model, x)) == [("NK504", None)]


def test_a_wrapped_export_is_matched_by_values():
    model, x = Net().eval(), image()
    wrapped = nn.Sequential(nn.Identity(), copy.deepcopy(model))
    wrapped[1].bn1.eps = 0.5
    check = check_export(export(wrapped, (x,)), model, x)
    assert codes(check) == [("NK502", "bn1"), ("NK504", None)]
    wrapped = nn.Sequential(nn.Identity(), Net(nk.GhostBatchNorm2d)).train()
    model = copy.deepcopy(wrapped[1]).eval()
    check = check_export(export(wrapped, (x,)), model, x)  # no operator to match, but buffers that are written
    assert codes(check) == [("NK501", "1.bn1"), ("NK501", "1.bn2"), ("NK504", None)]


def test_a_shared_norm_is_one_layer():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.again = self.norm = nn.BatchNorm1d(4, eps=0.02)
            randomize_(self)

        def forward(self, x):
            return self.again(torch.relu(self.norm(x)))

    model, x = Shared().eval(), torch.randn(3, 4)
    check = check_export(export(model, (x,)), model, x)
    assert check.ok
    assert not check.skipped


@pytest.mark.deep
def test_signatures_and_nested_outputs(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            randomize_(self)

        def forward(self, a, b):
            return {"sum": self.bn(a + b), "both": (self.bn(a), b * 2)}

    model, a, b = Two().eval(), torch.randn(3, 4), torch.randn(3, 4)
    program = export(model, (), {"a": a, "b": b})
    assert check_export(program, model, {"a": a, "b": b}).ok
    program = export(model, (a, b))
    path = tmp_path / "two.onnx"
    torch.onnx.export(model, (a, b), path, dynamo=True, verbose=False, input_names=["a", "b"])
    for exported in (program, path):
        check = check_export(exported, model, (a, b), forward=lambda model, pair: model(*pair))
        assert check.ok, check
    assert check_export(path, model, {"b": b, "a": a}).ok  # by name, whatever the order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_tolerance_follows_the_type(dtype):
    model, x = Net().eval().to(dtype), image().to(dtype)
    assert check_export(export(model, (x,)), model, x).ok
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.bias += 8 * TOLERANCES[dtype] * model(x).abs().max()
    check = check_export(export(other, (x,)), model, x)
    assert codes(check) == [("NK504", None)]
    assert check.findings[0].evidence["tolerance"] == TOLERANCES[dtype]


def test_what_it_says(tmp_path):
    model, x = Net(), image()
    text = str(check_export(export(copy.deepcopy(model).train(), (x,)), model, x))
    assert "NK501 training-mode-export: bn1: " in text
    assert "outputs differ by" in text
    model.eval()
    assert "the exported model is the model" in str(check_export(export(model, (x,)), model, x))


def test_examples_that_do_not_run(tmp_path):
    model, x = Net().eval(), image()
    program = export(model, (x,))
    before = state_and_modes(model)
    with pytest.raises(ExampleError, match=r"Net does not run on the example \(\(4, 2, 8, 8\)\)"):
        check_export(program, model, torch.randn(4, 2, 8, 8))
    with pytest.raises(ExampleError, match=r"does not run on the example \(\(5, 3, 8, 8\)\)"):
        check_export(program, model, image(5))  # the model takes any number, the program was made for four
    path = to_onnx(model, x, tmp_path / "net.onnx", dynamo=True)
    with pytest.raises(ExampleError, match=r"OnnxModel does not run on the example \(\(5, 3, 8, 8\)\)"):
        check_export(path, model, image(5))
    assert_as_before(model, before)


def test_files_that_are_not_onnx(tmp_path):
    model, x = Net().eval(), image()
    junk = tmp_path / "junk.onnx"
    for content in (b"", b"not a model at all", bytes(range(256)) * 8):
        junk.write_bytes(content)
        with pytest.raises(OnnxError, match=r"junk\.onnx is not an ONNX model"):
            check_export(junk, model, x)
    with pytest.raises(OnnxError, match="does not exist"):
        check_export(tmp_path / "none.onnx", model, x)
    with pytest.raises(ArgumentError, match=r"needs a torch\.export\.ExportedProgram.*got a Net"):
        check_export(model, model, x)
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module; got a Tensor"):
        check_export(junk, x, model)


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    path = to_onnx(Net().eval(), image(), tmp_path / "net.onnx", dynamo=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime.*normkit\[export\]"):
        check_export(path, Net(), image())
