"""Weight decay acts on weights alone, by what a layer is, on models of anyone."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normkit as nk
from support.networks import built_by_others


def groups_of(groups):
    return {one.name: one.group for one in groups.placed}


def exempt(groups):
    return {one.name for one in groups.placed if one.group == "not decayed"}


class Scaled(nn.Module):
    """Whatever has parameters that are no layer's of torch."""

    def __init__(self):
        super().__init__()
        self.layer_scale = nn.Parameter(torch.ones(6))
        self.maps_scale = nn.Parameter(torch.ones(6, 1, 1))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 6))
        self.position_embedding = nn.Parameter(torch.randn(9, 6))
        self.mixing = nn.Parameter(torch.randn(6, 6))
        self.bias_table = nn.Parameter(torch.randn(5, 6))


def test_each_parameter_goes_where_its_layer_says():
    model = nn.Sequential()
    model.tokens = nn.Embedding(10, 6)
    model.conv = nn.Conv1d(6, 6, 1)
    model.oddly_named = nn.BatchNorm1d(6)  # no "bn" and no "norm" in its name
    model.ours = nk.RMSNorm(6)
    model.attention = nn.MultiheadAttention(6, 2, add_bias_kv=True)
    model.cell = nn.GRU(6, 6)
    model.slope = nn.PReLU(6)
    model.thin = nn.Linear(1, 6)  # a weight, though it has one number for each output
    model.norm_in_name = nn.Linear(6, 1)
    model.scaled = Scaled()
    found = groups_of(nk.parameter_groups(model))
    weights = {
        *("tokens.weight", "conv.weight", "thin.weight", "norm_in_name.weight", "scaled.mixing"),
        *("attention.in_proj_weight", "attention.out_proj.weight", "cell.weight_ih_l0", "cell.weight_hh_l0"),
        *("scaled.cls_token", "scaled.position_embedding"),
    }
    assert {name for name, group in found.items() if group == "decayed"} == weights
    assert set(found) - weights == exempt(nk.parameter_groups(model))
    without = exempt(nk.parameter_groups(model, embeddings=False))
    assert without - exempt(nk.parameter_groups(model)) == {
        *("tokens.weight", "scaled.cls_token", "scaled.position_embedding")
    }
    scales = exempt(nk.parameter_groups(model)) - exempt(nk.parameter_groups(model, scales=True))
    assert scales == {"slope.weight", "scaled.layer_scale", "scaled.maps_scale", "scaled.temperature"}


def test_an_optimizer_decays_the_weights_and_nothing_else():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 3, 5, 5))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups = nk.parameter_groups(model, weight_decay=0.25, lr=0.1)
    optimizer = torch.optim.SGD(groups)  # no rate of its own: the groups have one
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.25 * 0.1 * (name in ("0.weight", "3.weight")))
        torch.testing.assert_close(parameter.detach(), expected)
    assert [group["name"] for group in optimizer.param_groups] == ["decayed", "not decayed"]


def test_printed_it_says_why():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    assert str(nk.parameter_groups(model, 0.05, lr=0.001)) == "\n".join(
        [
            "decayed (weight decay 0.05, lr 0.001), 1:",
            "  0.weight: weight of 0 (Linear)",
            "not decayed (weight decay 0, lr 0.001), 2:",
            "  1.weight: gamma or beta of 1 (LayerNorm)",
            "  1.bias: gamma or beta of 1 (LayerNorm)",
            "left out, 1:",
            "  0.bias: needs no gradient",
        ]
    )


def test_what_needs_no_gradient_is_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].requires_grad_(False)
    groups = nk.parameter_groups(model)
    assert [parameter for group in groups for parameter in group["params"]] == [model[0].weight, model[0].bias]
    model.requires_grad_(False)
    with pytest.raises(nk.ArgumentError, match="Sequential has no parameter that needs a gradient"):
        nk.parameter_groups(model)


def test_a_shared_table_is_there_once_and_decayed_if_both_layers_would():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["tokens"].weight
    assert groups_of(nk.parameter_groups(model)) == {"tokens.weight": "decayed"}
    assert groups_of(nk.parameter_groups(model, embeddings=False)) == {"tokens.weight": "not decayed"}


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_length_of_a_weight_is_a_scale(norm):
    groups = nk.parameter_groups(norm(nn.Linear(3, 4)))
    decayed = [parameter.shape for parameter in groups[0]["params"]]
    assert decayed == [(4, 3)]


def test_what_a_model_excludes_itself_is_not_decayed():
    class Excluding(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ParameterList([torch.randn(3, 4), torch.randn(3, 4)])
            self.fc = nn.Linear(3, 4)

        def no_weight_decay(self):
            return {"tables.1"}

    model = nn.Sequential(Excluding())
    assert exempt(nk.parameter_groups(model)) == {"0.tables.1", "0.fc.bias"}


def test_a_norm_that_nobody_knows_is_one_by_its_name():
    class GlobalResponseNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.zeros(1, 1, 1, 4))

        def forward(self, x):
            return x + self.gamma * x * x.norm(dim=(1, 2), keepdim=True)

    assert exempt(nk.parameter_groups(nn.Sequential(GlobalResponseNorm()))) == {"0.gamma"}


@built_by_others
def test_networks_of_others(build):
    must_agree_with_types(build())


def must_agree_with_types(model):
    """Compare with a truth by the types of torch's layers and the one-dimensional parameters of all others."""
    model.requires_grad_(True)
    found, seen = groups_of(nk.parameter_groups(model)), set()
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if full not in found:
                continue  # shared, and listed by another name
            seen.add(full)
            is_linear = isinstance(layer, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding) and name == "weight"
            is_norm = isinstance(layer, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
            if is_linear or (not is_norm and parameter.dim() > 1 and "bias" not in name):
                assert found[full] == "decayed", full
            else:
                assert found[full] == "not decayed", full
    assert seen == set(found)


def test_groups_can_be_copied_and_pickled():
    groups = nk.parameter_groups(nn.Linear(2, 3))
    for twin in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert str(twin) == str(groups)
        assert [len(group["params"]) for group in twin] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.nn.Linear,), "parameter_groups needs a torch.nn.Module; got a type"),
        ((nn.Linear(2, 2), -0.1), "weight_decay must be a number, 0 or more; got -0.1"),
        ((nn.Linear(2, 2), float("nan")), "weight_decay must be a number, 0 or more; got nan"),
        ((nn.Linear(2, 2), "0.1"), "weight_decay must be a number, 0 or more; got '0.1'"),
        ((nn.Linear(2, 2), 0.1, True), "lr must be a number, 0 or more; got True"),
        ((nn.Sequential(nn.LazyLinear(2)),), r"0\.weight has no shape yet"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    with pytest.raises(nk.ArgumentError, match=said):
        nk.parameter_groups(*arguments)
