"""Graphs of torchao's and torch's quantization at the export gate: the norms that its passes change."""

import copy
import importlib

import pytest
import torch
from torch import fx, nn
from torch.export import export

import normkit as nk
from support import aside  # noqa: F401  # where torchao is
from support.cases import randomize_

pytestmark = [
    pytest.mark.deep,  # preparing one graph takes seconds
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def pt2e():
    """torchao's way by exported graphs, with a quantizer for x86."""
    pytest.importorskip("torchao")
    quantize = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    tools = importlib.import_module("torchao.quantization.pt2e")

    def prepared(model, x):
        config = x86.get_default_x86_inductor_quantization_config(is_qat=True)
        quantizer = x86.X86InductorQuantizer().set_global(config)
        return quantize.prepare_qat_pt2e(export(copy.deepcopy(model), (x,)).module(), quantizer)

    prepared.to_evaluation = tools.move_exported_model_to_eval
    return prepared


class Net(nn.Module):
    """A norm behind a convolution, which the passes rewrite, and one that is not."""

    def __init__(self, norm=nn.BatchNorm2d, **options):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = norm(8, **options)
        self.last = norm(8, **options)
        for bn in (self.bn, self.last):
            randomize_(bn)
            with torch.no_grad():
                bn.weight.uniform_(0.5, 1.5)  # the rewritten graph divides by it

    def forward(self, x):
        return self.last(torch.relu(self.bn(self.conv(x))))


def image():
    return torch.randn(4, 3, 8, 8)


def codes(check):
    return [(finding.code, finding.layer) for finding in check.findings]


def test_a_prepared_graph_is_the_model_in_training(pt2e):
    """Simulated quantization is switched off for the comparison, and on again."""
    model, x = Net(nk.BatchNorm2d).train(), image()
    graph = pt2e(model, x)
    before = copy.deepcopy(graph.state_dict())
    check = nk.check_export(graph, model, x)
    assert check.ok, check
    assert not check.skipped
    assert all(torch.equal(value, before[key]) for key, value in graph.state_dict().items())
    assert codes(nk.check_export(graph, model.eval(), x)) == [("NK501", "bn"), ("NK501", "last"), ("NK504", None)]


def test_what_preparation_resets_is_found(pt2e):
    """pytorch/ao#4107: behind a convolution eps becomes 1e-5 and momentum 0.1, whatever they were."""
    model, x = Net(eps=1e-2, momentum=0.03).train(), image()
    check = nk.check_export(pt2e(model, x), model, x)
    assert codes(check)[0] == ("NK502", "bn")
    assert check.findings[0].evidence == {"eps": (1e-5, 1e-2), "momentum": (0.1, 0.03)}
    assert ("NK504", None) in codes(check)


def test_what_the_move_to_evaluation_resets_is_found(pt2e):
    model, x = Net(eps=1e-2).train(), image()
    graph = pt2e(model, x)
    pt2e.to_evaluation(graph)
    check = nk.check_export(graph, model.eval(), x)
    assert [pair for pair in codes(check) if pair[0] == "NK502"] == [("NK502", "bn"), ("NK502", "last")]
    faithful = Net().train()
    graph = pt2e(faithful, x)
    pt2e.to_evaluation(graph)
    check = nk.check_export(graph, faithful.eval(), x)
    assert check.ok, check


class Rounded(nn.Module):
    """What a converted graph has in it: a network, and values that are rounded to integers and back."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        ops, settings = torch.ops.quantized_decomposed, (0.05, 0, -128, 127, torch.int8)
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(self.model(x), *settings), *settings)


def test_outputs_of_a_quantized_graph_are_measured():
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # which brings the operators
    model, x = Net().eval(), image()
    for graph in (export(Rounded(model), (x,)), export(Rounded(model), (x,)).module()):
        check = nk.check_export(graph, model, x)
        assert check.ok, check
        assert check.parity.max_abs > 0
        assert "rounds values to integers" in str(check)
        assert codes(nk.check_export(graph, model, x, rtol=1e-6))[-1] == ("NK504", None)


def test_graphs_of_torchs_own_passes():
    """torch.ao's fx mode puts a convolution and its norm into one layer, which has the norm inside."""
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = importlib.import_module("torch.ao.quantization").get_default_qat_qconfig_mapping("x86")
    model, x = Net(eps=1e-3, momentum=0.2).train(), image()
    graph = quantize_fx.prepare_qat_fx(copy.deepcopy(model), mapping, (x,))
    assert isinstance(graph, fx.GraphModule)
    check = nk.check_export(graph, model, x)
    assert check.ok, check
    inner = next(layer for layer in graph.modules() if isinstance(layer, nn.BatchNorm2d))
    inner.eps = 0.5
    assert ("NK502", "bn") in codes(nk.check_export(graph, model, x))
