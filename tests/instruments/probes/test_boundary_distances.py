"""Distances of data from where units switch and decisions change."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.case import randomize_


def distances(model, inputs, **options):
    with nk.attach(model, nk.probes.BoundaryDistances(inputs, **options), every=1) as recorder:
        recorder.step()
    assert recorder.stopped == {}
    return {record["layer"]: record for record in recorder.records}


def test_of_one_layer_they_are_those_of_hyperplanes():
    model = nn.Sequential(nn.Linear(5, 7), randomize_(nk.BatchNorm1d(7)), nn.ReLU(), nn.Linear(7, 3))
    x = torch.randn(30, 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = distances(model, x, units=7)
    linear, bn = model[0].double(), model[1].double()
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    h = (linear(x.double()) - bn.running_mean) * scale + bn.bias
    d = (h.abs() / (linear.weight.norm(dim=1) * scale.abs())).detach().flatten()
    assert found["1"]["median"] == pytest.approx(d.quantile(0.5).item(), rel=1e-4)
    assert found["1"]["near"] == pytest.approx(d.quantile(0.1).item(), rel=1e-3)
    assert found["1"]["flat"] == 0
    model.float()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_margins_of_a_linear_classifier():
    model, x = nn.Sequential(randomize_(nk.BatchNorm1d(4)), nn.Linear(4, 3)), torch.randn(40, 4)
    found = distances(model, x)[""]
    twin = model.double().eval()
    logits = twin(x.double())
    two = logits.topk(2, dim=1)
    slopes = twin[1].weight * (twin[0].weight / (twin[0].running_var + twin[0].eps).sqrt())
    normals = (slopes[two.indices[:, 0]] - slopes[two.indices[:, 1]]).norm(dim=1)
    margins = ((two.values[:, 0] - two.values[:, 1]) / normals).detach()
    assert found["median"] == pytest.approx(margins.quantile(0.5).item(), rel=1e-4)


def test_units_that_do_not_depend_on_the_input():
    model = nn.Sequential(nn.Linear(3, 4), nk.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight[:2] = 0
    found = distances(model, torch.randn(8, 3), units=4)
    assert found["1"]["flat"] == 0.5
    assert found["1"]["median"] > 0


def test_a_model_without_norms_needs_a_name():
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(nk.ArgumentError, match="finds no layer to measure"):
        distances(model, torch.randn(2, 3))
    assert distances(model, torch.randn(2, 3), layers="0")["0"]["median"] > 0


def test_inputs_that_have_no_gradient():
    with pytest.raises(nk.ArgumentError, match=r"floating point numbers, .* got torch.int64"):
        nk.probes.BoundaryDistances(torch.arange(3))
