"""Population statistics worked out another way, and the usual ways to re-estimate them, which miss."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from normkit.surgery.statistics.recalibrate import recalibrate


def uneven_batches(shape=(3, 8, 8), sizes=(2, 31, 5, 64, 7), moving=1.0):
    """Batches of unequal sizes and, as far as `moving` says, different distributions."""
    return [torch.randn(n, *shape) * (1 + moving * i / 2) + moving * i for i, n in enumerate(sizes)]


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def float64_population(model, batches):
    """Mean and unbiased variance of all that each norm is given, kept whole, in a float64 copy of the model."""
    twin = copy.deepcopy(model).double().eval()
    given = {name: [] for name in batch_norms(twin)}
    for name, layer in batch_norms(twin).items():
        layer.train()
        layer.register_forward_pre_hook(lambda _, x, kept=given[name]: kept.append(x[0].transpose(0, 1).flatten(1)))
    with torch.no_grad():
        for x in batches:
            twin(x.double())
    whole = {name: torch.cat(kept, 1) for name, kept in given.items()}
    return {name: (x.mean(1), x.var(1, unbiased=True)) for name, x in whole.items()}


def with_update_bn(model, batches):
    """What torch offers for averaged weights."""
    model = copy.deepcopy(model)
    update_bn(batches, model)
    return model


def with_precise_bn(model, batches):
    """The plain averages of all batches' statistics, each with the same weight."""
    model = copy.deepcopy(model).eval()
    norms = batch_norms(model).values()
    sums = [[torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)] for layer in norms]
    for layer in norms:
        layer.train()
        layer.momentum = 1.0
    with torch.no_grad():
        for x in batches:
            model(x)
            for layer, (mean, var) in zip(norms, sums, strict=True):
                mean += layer.running_mean
                var += layer.running_var
    for layer, (mean, var) in zip(norms, sums, strict=True):
        layer.running_mean, layer.running_var = mean / len(batches), var / len(batches)
    return model


CONTESTANTS = {
    "recalibrate": lambda model, batches: recalibrate(model, batches).model,
    "update_bn": with_update_bn,
    "PreciseBN, equal weights": with_precise_bn,
}


def distance(layer, mean, var):
    """The worst channel: of the mean in standard deviations, of the variance as a share of it.

    Variances count with eps, as the layer divides by them: a channel that a ReLU leaves at zero has none of its own.
    """
    var_eps = var + layer.eps
    means = (layer.running_mean.double() - mean).abs() / var_eps.sqrt()
    variances = (layer.running_var.double() - var).abs() / var_eps
    return torch.cat([means.flatten(), variances.flatten()]).max().item()


def errors(model, batches):
    """By contestant and layer, how far the stored statistics are from the population's."""
    expected = float64_population(model, batches)
    found = {}
    for name, run in CONTESTANTS.items():
        layers = batch_norms(run(model, batches))
        found[name] = {layer: distance(layers[layer], *expected[layer]) for layer in expected}
    return found
