"""The gap between training and evaluation, shared out over layers, and its cause."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import normkit as nk
from normkit.lab.models import MODELS
from support.patients import Case, cnn, images, settled


def bright(batches, seed=0):
    """Pictures of which one channel of three is brighter in one half: something that a small net learns at once."""
    drawing = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        y = torch.randint(4, (32,), generator=drawing)
        x = torch.randn(32, 3, 16, 16, generator=drawing)
        for i, label in enumerate(y.tolist()):
            x[i, label % 3, : 8 * (1 + label // 3)] += 1.5
        found.append((x, y))
    return found


@pytest.fixture(scope="module")
def trained():
    """A residual network that classifies well; averaged weights, and its batches."""
    torch.manual_seed(0)
    model, batches = MODELS["resnet"](8, nn.BatchNorm2d, width=8, classes=4), bright(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = copy.deepcopy(model)
    for step in range(60):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.02)
    for mine, its in zip(average.buffers(), model.buffers(), strict=True):
        mine.copy_(its)
    return model.eval(), average.eval(), bright(6, seed=1)


def accuracy(model, batches):
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).float().mean().item() for x, y in batches) / len(batches)


def norms_of(model):
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]


def stale(model, batches):
    found = nk.examine(model, batches, F.cross_entropy).findings
    return {one.layer: one for one in found if one.code == "NK102"}


@pytest.mark.deep
def test_two_spoiled_layers_are_named_with_the_whole_gap(trained):
    model, _, batches = trained
    assert accuracy(model, batches) > 0.9
    assert nk.examine(model, batches, F.cross_entropy).ok
    spoiled = copy.deepcopy(model)
    names = norms_of(model)
    first, second = spoiled.get_submodule(names[2]), spoiled.get_submodule(names[5])
    with torch.no_grad():
        first.running_mean.add_(2 * first.running_var.sqrt())
        second.running_var.mul_(25)
    found = stale(spoiled, batches)
    assert set(found) == {names[2], names[5]}
    assert sum(one.evidence["share"] for one in found.values()) > 0.9
    assert all(one.severity == "error" for one in found.values())
    cured = nk.recalibrate(spoiled, batches).model
    assert accuracy(cured, batches) > accuracy(model, batches) - 0.005


@pytest.mark.deep
def test_averaged_weights_are_named_as_the_cause(trained):
    _, average, batches = trained
    found = stale(average, batches)
    assert found
    assert all(one.evidence["cause"] == "averaged-weights" for one in found.values())
    assert all("EMA or SWA" in one.message for one in found.values())


@pytest.mark.deep
@pytest.mark.parametrize("by_mask", [False, True])
def test_pruning_is_named_as_the_cause(trained, by_mask):
    model, _, batches = trained
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            prune.l1_unstructured(layer, "weight", 0.6)
            if not by_mask:
                prune.remove(layer, "weight")
    found = stale(model, batches)
    assert found
    assert all(one.evidence["cause"] == "pruning" for one in found.values())
    assert "60%" in next(iter(found.values())).message


@pytest.mark.deep
def test_a_scaled_input_is_named_as_the_cause(trained):
    model, _, batches = trained
    found = stale(model, [(3 * x, y) for x, y in batches])
    first = norms_of(model)[0]
    assert set(found) == {first}
    assert found[first].evidence["cause"] == "input-scaled"
    assert "2.9 times" in found[first].message or "3 times" in found[first].message


def test_the_parts_of_two_layers_add_up_to_the_gap_and_are_sorted():
    batches = images()
    model = settled(cnn(), batches)
    with torch.no_grad():
        model[1].running_mean.add_(1.5 * model[1].running_var.sqrt())
        model[4].running_var.mul_(9)
    case = Case(model, batches)
    found = case.examine("NK102").findings
    assert {one.layer for one in found} == {"1", "4"}
    assert sum(one.evidence["share"] for one in found) == pytest.approx(1, abs=0.05)
    shares = [one.evidence["share"] for one in found]
    assert shares == sorted(shares, reverse=True)


def test_few_steps_are_named_as_the_cause():
    batches = images()
    model = cnn().train()
    for x, _ in batches:
        model(x)
    found = [one for one in nk.examine(model, batches).findings if one.code == "NK102"]
    assert {one.evidence["cause"] for one in found} == {"few-steps"}
    assert "4 updates with momentum 0.1 leave 0.66" in found[0].message


def test_a_layer_between_the_thresholds_is_not_blamed_for_a_gap_that_is_not_there():
    batches = images()
    model = settled(cnn(), batches)
    with torch.no_grad():
        model[1].running_mean.add_(0.2 * model[1].running_var.sqrt())
        model[4].running_var.mul_(1.3)
    assert nk.examine(model, batches, F.cross_entropy).ok


@pytest.mark.deep
def test_the_spread_of_dropout_is_not_taken_for_stale_statistics():
    batches = images(8)
    model = cnn()
    model.insert(3, nn.Dropout(0.5))
    settled(model, batches)
    norm = model[5].train()
    norm.momentum = None
    norm.reset_running_stats()
    model[3].train()
    with torch.no_grad():
        for x, _ in batches:
            model(x)
    codes = {one.code: one for one in nk.examine(model.train(), batches).findings}
    assert "NK102" not in codes
    assert codes["NK303"].layer == "5"
    assert codes["NK303"].evidence["shift"] > 0.1
