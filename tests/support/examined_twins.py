"""For every rule that examine checks by itself, a model with the fault and one without: they differ by one line."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from support.patients import Case, cnn, healthy, images, mlp, rows, settled, twins


def _changed(case: Case, change, *layers: str) -> Case:
    with torch.no_grad():
        change(case.model)
    case.layers = set(layers)
    return case


@twins("NK101")
def _():
    return _changed(healthy(), lambda m: m[4].reset_running_stats(), "4"), healthy()


@twins("NK102")
def _():
    def moved(by):
        return lambda m: m[4].running_mean.add_(by * m[4].running_var.sqrt())

    return _changed(healthy(), moved(0.6), "4"), _changed(healthy(), moved(0.25))


@twins("NK103")
def _():
    return _changed(healthy(), lambda m: m[1].running_var[2].fill_(torch.nan), "1"), healthy()


@twins("NK104")
def _():
    def momentum(value):
        return lambda m: setattr(m[4], "momentum", value)

    return _changed(healthy(), momentum(0.99), "4"), _changed(healthy(), momentum(0.01))


@twins("NK105")
def _():
    def weights(scale):
        batches, model = images(), cnn()
        with torch.no_grad():
            model[3].weight.mul_(scale)
        return Case(settled(model, batches), batches, {"4"})

    return weights(1e-3), weights(1.0)


@twins("NK106")
def _():
    def of_size(size):
        batches = rows(8, size)
        return Case(settled(mlp(), rows(8, 32)), batches, {"1"})

    return of_size(5), of_size(12)


@twins("NK107")
def _():
    def loader(drop_last):
        data = TensorDataset(torch.randn(33, 6), torch.randint(4, (33,)))
        model = settled(mlp(), rows())
        return Case(model.train(), DataLoader(data, batch_size=8, drop_last=drop_last), {"1"})

    return loader(False), loader(True)


@twins("NK108")
def _():
    def domains(apart):
        batches = [(x + apart * (i % 2), y) for i, (x, y) in enumerate(images(6))]
        return Case(settled(cnn(), batches), batches, {"1"})

    return domains(3.0), domains(0.0)


@twins("NK109")
def _():
    def sequences(pad):
        batches = [torch.randn(8, 6, 24) for _ in range(4)]
        for x in batches:
            for i, length in enumerate(torch.randint(6, 20, (8,)).tolist()):
                x[i, :, length:] *= 1 - pad
        model = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())
        return Case(settled(model, batches), batches, {"1"})

    return sequences(1), sequences(0)


@twins("NK201")
def _():
    def tracking(track):
        model = cnn()
        model[4] = nn.BatchNorm2d(8, track_running_stats=track)
        return Case(settled(model, images()), images(), {"4"})

    return tracking(False), tracking(True)


@twins("NK202")
def _():
    def frozen(training):
        case = healthy()
        case.model[:6].requires_grad_(False)
        case.model.train()
        case.model[:6].train(training)
        case.layers = {"1", "4"}
        return case

    return frozen(True), frozen(False)


@twins("NK203")
def _():
    def mode(training):
        case = healthy()
        case.model.train()[4].train(training)
        case.layers = {"4"}
        return case

    return mode(False), mode(True)


@twins("NK301")
def _():
    def bias(has_one):
        case = healthy(bias=has_one)
        case.layers = {"0", "3"}
        return case

    return bias(True), bias(False)


@twins("NK302")
def _():
    def decay(value):
        case = healthy()
        case.options["optimizer"] = torch.optim.SGD(case.model.parameters(), lr=0.1, weight_decay=value)
        case.layers = {"1", "4"}
        return case

    return decay(1e-4), decay(0.0)


class Dropping(nn.Module):
    """F.dropout in a forward, before or after the norm."""

    def __init__(self, before):
        super().__init__()
        self.first, self.norm, self.last, self.before = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 4), before

    def forward(self, x):
        x = F.relu(self.first(x))
        if self.before:
            return self.last(self.norm(F.dropout(x, 0.5, self.training)))
        return self.last(F.dropout(self.norm(x), 0.5, self.training))


@twins("NK303")
def _():
    def dropping(before):
        return Case(settled(Dropping(before), rows()).train(), rows(), {"norm"})

    return dropping(True), dropping(False)


@twins("NK304")
def _():
    def groups(count):
        model = nn.Sequential(nn.Conv2d(3, 8, 8), nn.GroupNorm(count, 8), nn.Flatten())
        return Case(settled(model, images()), images(), {"1"})

    return groups(8), groups(2)


class TwoBranches(nn.Module):
    """One norm for two branches, or one for each."""

    def __init__(self, shared):
        super().__init__()
        self.one, self.other = nn.Linear(6, 16), nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.norm_of_other = self.norm if shared else nn.BatchNorm1d(16)
        with torch.no_grad():
            self.other.bias.add_(2)

    def forward(self, x):
        return self.norm(self.one(x)) + self.norm_of_other(self.other(x))


@twins("NK305")
def _():
    return tuple(Case(settled(TwoBranches(shared), rows()), rows(), {"norm"}) for shared in (True, False))


@twins("NK306")
def _():
    def zeroed(learns):
        case = healthy()
        with torch.no_grad():
            case.model[1].weight[:3] = 0
            case.model[1].bias.clamp_(min=0.1)
        case.model[1].weight.requires_grad_(learns)
        case.layers = {"1"}
        return case

    return zeroed(False), zeroed(True)


@twins("NK501")
def _():
    def traced(training):
        model = settled(cnn(), images()).train(training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own checks of sizes
            graph = torch.jit.trace(model, images()[0][0], check_trace=False)
        return Case(graph, images(), {"4", "1"})

    return traced(True), traced(False)


@twins("NK503")
def _():
    def offset(bias):
        batches = [x.bfloat16() for x, _ in images()]
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        with torch.no_grad():
            model[0].bias.fill_(bias)
        return Case(settled(model.bfloat16(), batches).eval(), batches, {"1"})

    return offset(3000.0), offset(0.1)
