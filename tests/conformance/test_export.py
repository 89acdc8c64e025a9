"""torch.export and ONNX carry each layer; what runs there gives what ran here."""

import copy
import logging

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from support.cases import CASES
from support.depth import first_of_each, thinned

BY_CLASS = first_of_each(CASES, lambda case: case.name)

# This exporter takes seconds for a row: in the ordinary run, one for torch's own operator, one for arithmetic of ours.
MECHANISMS = {"BatchNorm2d", "WhitenedBatchNorm2d"}


def test_every_mechanism_is_a_row():
    assert {str(case) for case in CASES} >= MECHANISMS


@pytest.mark.parametrize("training", thinned([True, False], bool), ids=["train", "eval"])
@pytest.mark.parametrize("case", BY_CLASS, ids=str)
def test_torch_export(case, training):
    layer, x = case.layer(training=training), case.input()
    program = torch.export.export(copy.deepcopy(layer), (x,)).module()
    assert not [node for node in program.graph.nodes if str(node.target).startswith("normkit")]  # it runs without us
    torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-5)
    for name, b in layer.named_buffers():
        torch.testing.assert_close(program.get_buffer(name), b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes become constants, as in torch's own layers
@pytest.mark.parametrize("case", thinned(CASES, lambda case: str(case) in MECHANISMS), ids=str)
def test_onnx_by_dynamo_in_onnxruntime(case, tmp_path):
    assert_equal_in_onnxruntime(case, tmp_path / "layer.onnx", dynamo=True)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", BY_CLASS, ids=str)
def test_onnx_by_torchscript_in_onnxruntime(case, tmp_path):
    assert_equal_in_onnxruntime(case, tmp_path / "layer.onnx", dynamo=False)


def assert_equal_in_onnxruntime(case, path, dynamo):
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    layer, x = case.layer(training=False), case.input()
    torch.onnx.export(nn.Sequential(layer).eval(), (x,), path, dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, layer(x).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fx_sees_one_module(case, training):
    layer, x = case.layer(training=training), case.input()
    traced = torch.fx.symbolic_trace(nn.Sequential(copy.deepcopy(layer)))
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [traced.get_submodule(node.target).__class__ for node in calls] == [type(layer)]
    assert torch.equal(traced(x), layer(x))
