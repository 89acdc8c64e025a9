"""`only=` and `skip=`: names and patterns, in every verb, and what is said of those that fit nothing."""

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.selection import Selection
from support.foreign_norms import Scattered, picture, randomized, same_picture


class Net(nn.Module):
    """Two stages of convolutions with batch norms, a layer norm, and a layer that stands under two names."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.layer10 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.tail = self.layer10[1]
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for part in (self.stem, self.layer1, self.layer10):
            x = part(x).relu()
        return self.norm(x.mean((2, 3)))


def net():
    return randomized(Net()).eval()


ALL = ["stem.1", "layer1.1", "layer1.3", "layer10.1", "norm"]
BATCH = ALL[:-1]
X = torch.randn(6, 3, 5, 5)


def taken(only=None, skip=None):
    return [name for name in ALL if name in Selection(net(), only, skip).among(ALL)]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, ALL),
        ("layer1", ["layer1.1", "layer1.3"]),  # and not layer10
        ("layer1.3", ["layer1.3"]),
        ("layer*", ["layer1.1", "layer1.3", "layer10.1"]),
        ("layer?", ["layer1.1", "layer1.3"]),
        ("layer[01]", ["layer1.1", "layer1.3"]),
        ("*.1", ["stem.1", "layer1.1", "layer10.1"]),
        ("tail", ["layer10.1"]),
        (["stem", "norm"], ["stem.1", "norm"]),
        (("stem", "*.3"), ["stem.1", "layer1.3"]),
        ("*", ALL),
    ],
)
def test_names_and_patterns(only, expected):
    assert taken(only) == expected
    if only is not None:
        assert taken(skip=only) == [name for name in ALL if name not in expected]


def test_what_is_skipped_is_skipped_whatever_is_named():
    assert taken("layer*", "layer1.1") == ["layer1.3", "layer10.1"]
    assert taken("layer1.1", "layer1.1") == []


def test_a_name_is_more_than_an_outer_one():
    selection = Selection(net(), ["layer1", "*10.1"])
    assert [selection.names(name) for name in ALL] == [False, False, False, True, False]


def test_layers_in_lists_are_named_as_they_are_printed():
    model = Scattered()
    names = ["odd name-1/2", "shared", "blocks[0]", "blocks[1][0]", "heads['a']"]
    for only, expected in (
        ("blocks[0]", ["blocks[0]"]),
        ("blocks", ["blocks[0]", "blocks[1][0]"]),
        ("blocks[1]", ["blocks[1][0]"]),
        ("heads['a']", ["heads['a']"]),
        ("again", ["shared"]),
        ("odd name*", ["odd name-1/2"]),
    ):
        assert sorted(Selection(model, only).among(names)) == sorted(expected)


def test_the_model_itself_has_an_empty_name():
    assert Selection(nn.BatchNorm2d(3), "").among([""]) == {""}
    with pytest.raises(nk.ArgumentError, match="only='' fits no norm of this model"):
        taken("")


# In every verb


def changed(surgery):
    return [change.layer for change in surgery.changed]


VERBS = {
    "convert": lambda model, **chosen: nk.convert(model, "group", **chosen),
    "fold": lambda model, **chosen: nk.fold(model, X, **chosen),
    "freeze": lambda model, **chosen: nk.freeze(model, **chosen),
    "unfreeze": lambda model, **chosen: nk.unfreeze(nk.freeze(model).model, **chosen),
    "recalibrate": lambda model, **chosen: nk.recalibrate(model, [X, X + 1], **chosen),
    "adapt": lambda model, **chosen: nk.adapt(model, [X, X + 1], max_drift=None, collapse=0.0, **chosen),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_changes_what_is_named_and_nothing_else(verb):
    model = net()
    before = picture(model)
    done = VERBS[verb](model, only=["layer1", "tail"], skip="layer1.1")
    assert changed(done) == ["layer1.3", "layer10.1"]
    reasons = {skipped.layer: skipped.why for skipped in done.skipped}
    assert reasons["stem.1"] == "only= does not name it"
    assert reasons["layer1.1"] == "skip= names it"
    assert same_picture(picture(model), before)
    assert changed(VERBS[verb](model, skip=["stem", "layer10", "norm"])) == ["layer1.1", "layer1.3"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_run_afterwards_is_the_model_with_those_layers_changed(verb):
    model = net()
    done = VERBS[verb](model, only="layer1")
    kept = {name: layer for name, layer in model.named_modules() if name in ("stem.1", "layer10.1", "norm")}
    for name, layer in kept.items():
        other = done.model.get_submodule(name)
        if verb != "unfreeze":
            assert type(other) is type(layer)
        for key, value in layer.state_dict().items():
            assert torch.equal(other.state_dict()[key], value)
    assert done.model(X).isfinite().all()


def test_tent_steps_on_what_is_named():
    model = net()
    done = nk.adapt(model, [X, X + 1], "tent", only="layer1", collapse=0.0, lr=1e-4)
    assert changed(done) == ["layer1.1", "layer1.3"]
    assert torch.equal(done.model.norm.weight, model.norm.weight)
    assert not torch.equal(done.model.layer1[1].weight, model.layer1[1].weight)


def test_no_updates_of_what_is_named():
    model = net().train()
    for chosen, still in (({"only": "layer1"}, BATCH[1:3]), ({"skip": ["stem", "tail"]}, BATCH[1:3]), ({}, BATCH)):
        before = {name: model.get_submodule(name).running_mean.clone() for name in BATCH}
        with nk.no_updates(model, **chosen):
            model(X)
        same = [name for name in BATCH if torch.equal(model.get_submodule(name).running_mean, before[name])]
        assert same == still


def test_no_updates_names_what_has_no_statistics():
    with (
        pytest.raises(nk.ArgumentError, match="only='norm' fits no layer of this model with statistics"),
        nk.no_updates(net(), only="norm"),
    ):
        pass


def test_a_layer_that_is_named_and_left_is_warned_of():
    model = net()
    with pytest.warns(nk.NormkitWarning, match="norm: it stores no statistics"):
        nk.freeze(model, only=["norm", "stem"])
    with pytest.warns(nk.NormkitWarning, match="norm: "):  # nothing follows it
        nk.fold(model, X, only="norm")
    nk.fold(model, X)  # all that can be folded: what cannot is in .skipped alone


# Bad input


@pytest.mark.parametrize("verb", [*VERBS, "no_updates"])
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"only": "layr1"}, r"only='layr1' fits no layer of this model. Did you mean \"layer1\"\?"),
        ({"skip": "layer1.9"}, r"skip='layer1\.9' fits no layer of this model. Did you mean \"layer1\..\"\?"),
        ({"only": ["layer1", "zzz*"]}, r"only='zzz\*' fits no layer of this model\.$"),
        ({"only": "stem.0"}, r"only='stem\.0' fits no (norm of this model|layer of this model with statistics)"),
        ({"only": []}, "only= needs a name or a pattern; got none"),
        ({"only": 3}, "only= needs the name of a layer, a shell pattern, or several of them; got a int"),
        ({"skip": ["stem", None]}, "skip= needs the name .*; got a NoneType"),
        ({"only": nn.ReLU()}, "got a ReLU"),
    ],
    ids=str,
)
def test_bad_input(verb, chosen, message):
    model = net()
    before = picture(model)
    with pytest.raises(nk.ArgumentError, match=message):
        call(verb, model, chosen)
    assert same_picture(picture(model), before)


def call(verb, model, chosen):
    if verb == "no_updates":
        with nk.no_updates(model, **chosen):
            raise AssertionError("the block was entered")
    inplace = {} if verb == "unfreeze" else {"inplace": True}
    VERBS[verb](model, **chosen, **inplace)
