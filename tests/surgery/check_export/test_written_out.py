"""Norms that an export writes out as arithmetic: in half types, and in opsets older than their operators."""

import copy
import logging
from functools import partial

import onnx
import pytest
import torch
from torch import nn
from torch.export import export

import normkit as nk
from normkit.surgery.check_export.written_out import Step, half_norms
from support.depth import thinned

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Rms(nn.Module):
    """As language models write it, with or without float32 for the squares."""

    def __init__(self, widened):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)
        self.widened = widened

    def forward(self, x):
        wide = x.float() if self.widened else x
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ByVariance(nn.Module):
    def forward(self, x):
        var, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) / torch.sqrt(var.clamp(min=1e-4))


class Products(nn.Module):
    def forward(self, x):
        return x * ((x * x).mean(-1, keepdim=True) + 1e-5) ** -0.5


IN_FLOAT32 = [
    lambda: Rms(True),
    partial(nn.LayerNorm, 6),
    partial(nn.RMSNorm, 6),
    partial(nk.LayerNorm, 6),
    partial(nk.RMSNorm, 6),
]


def findings(model, x, **options):
    check = nk.check_export(export(model, (x,)), model, x, **options)
    return check, [(f.code, f.severity, f.layer, f.evidence.get("dtype")) for f in check.findings]


@pytest.mark.parametrize("norm", [lambda: Rms(False), ByVariance, Products])
@pytest.mark.parametrize("dtype", thinned([torch.float16, torch.bfloat16], lambda dtype: dtype is torch.float16))
def test_statistics_in_a_half_type_are_found(norm, dtype):
    model = nn.Sequential(nn.Linear(6, 6), norm()).to(dtype).eval()
    check, found = findings(model, torch.randn(3, 6, dtype=dtype))
    severity = "warning" if dtype is torch.float16 else "info"
    assert found == [("NK504", severity, "1", str(dtype).removeprefix("torch."))]
    assert check.ok is (dtype is torch.bfloat16)
    assert ("65504" in str(check)) is (dtype is torch.float16)


@pytest.mark.parametrize("norm", thinned(IN_FLOAT32, lambda norm: norm is IN_FLOAT32[-1]))
def test_statistics_in_float32_are_not(norm):
    """torch's and our operators take them in float32, whole or decomposed; so do most language models."""
    model = nn.Sequential(nn.Linear(6, 6), norm()).half().eval()
    x = torch.randn(3, 6, dtype=torch.float16)
    assert findings(model, x)[1] == []
    program = export(model, (x,)).run_decompositions()
    assert not nk.check_export(program, model, x).findings


def test_in_float32_everything_may_be_written_out():
    assert findings(nn.Sequential(Rms(False), ByVariance(), Products()).eval(), torch.randn(3, 6))[1] == []


def test_the_overflow_is_real():
    """What the warning is about: the operator takes 300, arithmetic in float16 does not."""
    x = torch.full((1, 6), 300.0, dtype=torch.float16)
    assert torch.isfinite(nn.RMSNorm(6).half()(x)).all()
    assert not Rms(False).half()(x).any()


def steps(**types):
    return {
        "square": Step("square", ["x"], types.get("square"), "norm"),
        "mean": Step("mean", ["square"], types.get("mean"), "norm"),
        "sum": Step("pass", ["mean", "eps"], None, "norm"),
        "root": Step("root", ["sum"], None, "norm"),
    }


def test_the_pattern():
    half, wide = torch.float16, torch.float32
    assert half_norms(steps(square=half, mean=wide)) == {"norm": half}
    assert half_norms(steps(square=wide, mean=half)) == {"norm": half}
    assert half_norms(steps(square=wide, mean=wide)) == {}
    assert half_norms(steps()) == {}  # a graph that says nothing about types
    without_root = {name: step for name, step in steps(square=half).items() if name != "root"}
    assert half_norms(without_root) == {}
    of_something_else = steps(mean=half) | {"square": Step("other", ["x"], half, "norm")}
    assert half_norms(of_something_else) == {}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6, eps=1e-3), nn.Linear(6, 2)

    def forward(self, x):
        return self.fc(self.norm(x))


def to_onnx(model, x, path, dynamo=False, **options):
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False, **options)
    return path


def test_an_opset_older_than_the_operator(tmp_path):
    model, x = Last().eval(), torch.randn(3, 6)
    check = nk.check_export(to_onnx(model, x, tmp_path / "old.onnx", opset_version=16), model, x)
    assert check.ok, check  # it computes the same
    (finding,) = check.findings
    assert (finding.code, finding.severity, finding.layer) == ("NK504", "info", "norm")
    assert finding.evidence == {"opset": 16, "needs": 17}
    assert "LayerNormalization needs opset 17, the model has 16" in finding.message
    assert "opset_version=17" in finding.remedy
    assert not nk.check_export(to_onnx(model, x, tmp_path / "new.onnx", opset_version=17), model, x).findings


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.deep), False], ids=["dynamo", "torchscript"])
def test_half_types_in_onnx(dynamo, tmp_path):
    """torch's exporters widen what they write out of a LayerNorm themselves; what a model wrote out stays as it is."""
    model, x = nn.Sequential(Last(), Rms(False)).half().eval(), torch.randn(3, 6, dtype=torch.float16)
    model[0].fc = nn.Linear(6, 6).half()
    options = {} if dynamo else {"opset_version": 16}
    check = nk.check_export(to_onnx(model, x, tmp_path / "half.onnx", dynamo, **options), model, x)
    found = {finding.layer: (finding.severity, finding.evidence) for finding in check.findings}
    severity, evidence = found.pop("1")
    assert (severity, evidence["dtype"], evidence["needs"]) == ("warning", "float16", 23)
    assert found == ({} if dynamo else {"0.norm": ("info", {"opset": 16, "needs": 17})})
    assert not check.ok


@pytest.mark.parametrize(
    ("norm", "shape", "operator", "needs"),
    [
        (nn.RMSNorm(6), (3, 6), "RMSNormalization", 23),
        (nn.LayerNorm(6), (3, 6), "LayerNormalization", 17),
        (nn.GroupNorm(2, 6), (3, 6, 4), "GroupNormalization", 21),
    ],
    ids=str,
)
def test_which_operator_is_missing(norm, shape, operator, needs):
    """Of a model that is an addition: none of its norms is in it."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    values = [helper.make_tensor_value_info(name, floats, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "sum", values[:1], values[1:])
    for opset in (needs - 1, needs):
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        check = nk.check_export(proto, copy.deepcopy(norm), torch.randn(shape), rtol=1e9)
        found = [finding.message for finding in check.findings]
        assert len(found) == (opset < needs)
        assert all(f"{operator} needs opset {needs}" in message for message in found)
