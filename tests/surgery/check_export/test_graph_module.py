"""GraphModules of torch.fx at the export gate: traced, taken out of a program, or with functions for norms."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.export import export
from torch.nn import functional as F

import normkit as nk
from support.cases import randomize_
from support.depth import thinned


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = norm(4, eps=2e-3, momentum=0.3)
        self.layer = nn.LayerNorm(6, eps=5e-3)
        randomize_(self)

    def forward(self, x):
        return self.layer(torch.relu(self.bn(self.conv(x))))


def image():
    return torch.randn(4, 3, 8, 8)


def codes(check):
    return [(finding.code, finding.layer) for finding in check.findings]


def traced(model, x):
    return fx.symbolic_trace(copy.deepcopy(model))


def exported(model, x):
    return export(copy.deepcopy(model), (x,)).module()


FORMS = pytest.mark.parametrize("form", thinned([traced, exported], lambda form: form is traced))
NORMS = pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BatchNorm2d])


@NORMS
@FORMS
def test_a_faithful_graph_passes_in_either_mode(form, norm):
    model, x = Net(norm), image()
    for mode in (False, True):
        graph = form(model.train(mode), x)
        before = copy.deepcopy((graph.state_dict(), model.state_dict()))
        check = nk.check_export(graph, model, x)
        assert check.ok, check
        assert not check.findings
        assert not check.skipped
        after = (graph.state_dict(), model.state_dict())
        for then, now in zip(before, after, strict=True):
            assert all(torch.equal(now[key], value) for key, value in then.items())
        assert model.training is mode


@NORMS
@FORMS
def test_a_graph_in_the_other_mode_is_found(form, norm):
    model, x = Net(norm), image()
    graph = form(model.train(), x)
    check = nk.check_export(graph, model.eval(), x)
    assert codes(check) == [("NK501", "bn"), ("NK504", None)]
    assert "move_exported_model_to_eval" in check.findings[0].remedy
    graph = form(model.eval(), x)
    check = nk.check_export(graph, model.train(), x)
    assert codes(check) == [("NK502", "bn"), ("NK504", None)]
    assert check.findings[0].evidence == {"mode": ("stored", "batch")}
    assert "in training by" in check.findings[1].message


def test_a_layer_that_the_model_keeps_in_evaluation_is_not_to_be_trained():
    model, x = Net().train(), image()
    graph = exported(model, x)
    model.bn.eval()
    assert codes(nk.check_export(graph, model, x)) == [("NK501", "bn"), ("NK504", None)]


@FORMS
def test_other_settings_are_found(form):
    model, x = Net().eval(), image()
    other = copy.deepcopy(model)
    other.bn.eps, other.bn.momentum, other.layer.eps = 0.25, 0.01, 1e-5
    check = nk.check_export(form(other, x), model, x)
    assert codes(check) == [("NK502", "bn"), ("NK502", "layer"), ("NK504", None)]
    assert check.findings[0].evidence == {"eps": (0.25, 2e-3), "momentum": (0.01, 0.3)}


class Functional(nn.Module):
    """Norms as functions, which a traced graph calls as they are."""

    def __init__(self, eps=0.02, training=False):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4, eps=0.02), nn.LayerNorm(5, eps=0.03)
        self.eps, self.in_training = eps, training
        randomize_(self)

    def forward(self, x):
        norm, last = self.norm, self.last
        y = F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.in_training, 0.1, eps=self.eps
        )
        return F.layer_norm(y, (5,), last.weight, last.bias, last.eps)


def test_functions_are_norms_too():
    model, x = Functional().eval(), torch.randn(3, 4, 5)
    check = nk.check_export(fx.symbolic_trace(model), model, x)
    assert check.ok, check
    assert not check.skipped
    other = Functional(eps=0.5, training=True).eval()
    other.load_state_dict(model.state_dict())
    check = nk.check_export(fx.symbolic_trace(other), model, x)
    assert codes(check) == [("NK501", "norm"), ("NK502", "norm"), ("NK504", None)]


def test_two_inputs_and_bad_ones():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = randomize_(nn.BatchNorm1d(4))

        def forward(self, a, b):
            return self.bn(a) + b

    model, pair = Two().eval(), (torch.randn(3, 4), torch.randn(3, 4))
    assert nk.check_export(fx.symbolic_trace(model), model, pair).ok
    with pytest.raises(nk.NormkitError, match="does not run on the example"):
        nk.check_export(fx.symbolic_trace(model), model, (torch.randn(3, 5), torch.randn(3, 5)))
    with pytest.raises(nk.ArgumentError, match=r"a torch\.fx\.GraphModule, .* got a Two"):
        nk.check_export(model, model, pair)
