"""Networks that others wrote, trained in an ordinary loop, on pictures that a network can tell apart."""

from __future__ import annotations

import importlib

import torch
from torch.nn import functional as F

from normkit.batches import feed
from normkit.surgery.fold.dataflow import outputs_of
from support.architectures import Architecture

LARGE = 224  # pixels: pictures of that side and more are made smaller, to be done within minutes


def pooled(output):
    """The first output as (N, classes): of maps (N, C, ...) the mean over positions, of sequences (N, L, C) as well."""
    first = outputs_of(output)[0].float()
    if first.dim() == 3:
        return first.mean(1)
    return first if first.dim() == 2 else first.flatten(2).mean(2)


def loss(output, target):
    return F.cross_entropy(pooled(output), target % pooled(output).shape[1])


def of_timm(name):
    importlib.import_module("support.aside")  # where timm is
    timm = importlib.import_module("timm")
    return Architecture(name, "timm", lambda: timm.create_model(name, num_classes=10), (3, LARGE, LARGE))


def batches_for(architecture, number=8, size=16, side=64):
    """Pictures of which half are brighter, with the labels 0 and 1."""
    shape = tuple(side if n >= LARGE else n for n in architecture.shape)
    found = []
    for _ in range(number):
        y = torch.randint(2, (size,))
        found.append((torch.randn(size, *shape) + 0.5 * y.reshape(-1, *[1] * len(shape)), y))
    return found


def forward_for(architecture):
    """How to run the network on such a batch, as examine takes it."""

    def forward(model, batch):
        return feed(model, batch[0] if architecture.key is None else {architecture.key: batch[0]})

    return forward


def begun(architecture, rate=0.01):
    """The network in training mode, and its optimizer."""
    torch.manual_seed(0)
    model = architecture.build().train()
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def train(architecture, model, optimizer, batches, steps=60):
    """An ordinary loop, at a rate that falls to 0: at a constant one, weights soon leave statistics behind."""
    forward = forward_for(architecture)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        loss(forward(model, batch), batch[1]).backward()
        optimizer.step()
        schedule.step()


def trained(architecture, batches, steps=60, rate=0.01):
    """The network after some steps, and its optimizer."""
    model, optimizer = begun(architecture, rate)
    train(architecture, model, optimizer, batches, steps)
    return model, optimizer
