"""A residual network trained on images and spoiled in four ways: what the cure gives back, on images it never saw."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import normkit as nk
from normkit.lab.data import load
from normkit.lab.models import MODELS

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def images():
    found = load("fashion-mini")
    return [(each.pixels.float().reshape(-1, 1, 28, 28) / 255, each.labels) for each in (found.train, found.test)]


@pytest.fixture(scope="module")
def trained(images):
    """The network, and the average of its weights with the network's own statistics."""
    torch.manual_seed(0)
    x, y = images[0]
    model = MODELS["resnet"](8, nn.BatchNorm2d, width=8, in_channels=1, stem_stride=2)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # At a rate that falls to 0 the moving averages come to rest, and are no matter of luck.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 200)
    for _ in range(200):
        pick = torch.randint(len(y), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.01)
    return model.eval(), average.eval()


@pytest.fixture(scope="module")
def batches(images):
    x, y = images[0]
    return list(zip(x[:1024].split(64), y[:1024].split(64), strict=True))


def accuracy(model, held_out, scale=1.0):
    with torch.no_grad():
        x, y = held_out
        return (model.eval()(scale * x).argmax(1) == y).float().mean().item()


def recalibrated_by_all(model, images):
    """With the statistics of all training images, which no cure on a few batches can better."""
    return nk.recalibrate(model, [(x,) for x in images[0][0].split(500)]).model


def cured(model, batches):
    diagnosis = nk.examine(model, batches, F.cross_entropy)
    assert not diagnosis.ok
    cure = diagnosis.cure()
    assert any(step.is_kept for step in cure.steps)
    assert min(step.after for step in cure.steps) < cure.steps[0].before
    return cure.model


def test_two_spoiled_layers(trained, images, batches):
    model = trained[0]
    spoiled = copy.deepcopy(model)
    layers = [layer for layer in spoiled.modules() if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        layers[2].running_mean.add_(2 * layers[2].running_var.sqrt())
        layers[5].running_var.mul_(25)
    good = accuracy(model, images[1])
    assert accuracy(spoiled, images[1]) < good - 0.1
    assert accuracy(cured(spoiled, batches), images[1]) > good - 0.005


def test_averaged_weights(trained, images, batches):
    average = trained[1]
    good = accuracy(recalibrated_by_all(average, images), images[1])
    assert accuracy(average, images[1]) < good - 0.1
    assert accuracy(cured(average, batches), images[1]) > good - 0.005


def test_pruned_weights(trained, images):
    """From all images, in as many batches as the doctor looks at: with so little left, a tenth of them is a draw."""
    pruned, (x, y) = copy.deepcopy(trained[0]), images[0]
    batches = list(zip(x.split(len(x) // 16), y.split(len(y) // 16), strict=True))
    for layer in pruned.modules():
        if isinstance(layer, nn.Conv2d):
            prune.l1_unstructured(layer, "weight", 0.6)
            prune.remove(layer, "weight")
    good = accuracy(recalibrated_by_all(pruned, images), images[1])
    assert accuracy(cured(pruned, batches), images[1]) > good - 0.005


def test_a_scaled_input(trained, images, batches):
    good = accuracy(trained[0], images[1])
    model = cured(trained[0], [(3 * x, y) for x, y in batches])
    assert accuracy(model, images[1], 3.0) > good - 0.005
