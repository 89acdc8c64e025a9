"""What folding promises beyond the function: undo, in place or not, what it refuses, what parity names."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.fold import fold
from support.fold_checks import check, double, ready


def state_of(model):
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    modes = [(type(m), m.training) for m in model.modules()]
    return hooks, modes, [(n, p.requires_grad) for n, p in model.named_parameters()], copy.deepcopy(model.state_dict())


def same(a, b):
    return a[:3] == b[:3] and a[3].keys() == b[3].keys() and all(torch.equal(a[3][key], b[3][key]) for key in a[3])


@pytest.mark.parametrize("inplace", [True, False])
def test_undo(inplace):
    model = ready(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nk.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        )
    )
    model[3].weight.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    example = double(2, 3, 6, 6)
    before, parameter, random = state_of(model), model[0].weight, torch.get_rng_state()
    result = fold(model, example, inplace=inplace)
    assert torch.equal(random, torch.get_rng_state())
    assert (result.model is model) == inplace
    assert same(before, state_of(model)) == (not inplace)
    assert result.undo() is model
    assert same(before, state_of(model))
    assert model[0].weight is parameter


def test_the_root_is_a_norm():
    model = ready(nn.BatchNorm2d(3))
    result = fold(model, double(2, 3, 4, 4))
    assert [change.layer for change in result.skipped] == [""]
    assert result.undo() is model


@pytest.mark.parametrize("build", [lambda: nn.BatchNorm2d(4), lambda: nk.BatchRenorm2d(4)])
def test_training_mode_is_refused(build):
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), build()))
    model[1].train()
    before = state_of(model)
    with pytest.raises(nk.ArgumentError, match=r"1 is in training mode. Call model.eval\(\)"):
        fold(model, double(2, 3, 5, 5), inplace=True)
    assert same(before, state_of(model))


def test_no_stored_statistics_are_refused():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)))
    with pytest.raises(nk.NormkitError, match="no stored statistics"):
        fold(model, double(2, 3, 5, 5))


def test_an_example_that_does_not_fit():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    before = state_of(model)
    with pytest.raises(nk.NormkitError, match=r"does not run on the example \(\(2, 7, 5, 5\)\)"):
        fold(model, double(2, 7, 5, 5), inplace=True)
    assert same(before, state_of(model))


def test_parity_names_no_layer_that_was_meant_to_change():
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.Dropout(),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.BatchNorm2d(4),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 1),
    ]
    result = check(ready(nn.Sequential(*layers)), double(2, 3, 6, 6), folded=2)
    assert result.parity.first_layer is None
