"""Training loops as people write them, around a small network in random state: some with a fault, some without."""

import torch
from torch import nn
from torch.nn import functional as F

from support.case import randomize_

CLASSES = 4
NORMS = ("1", "4")  # the names of the norms in `net`


def net(norm=nn.BatchNorm2d, **options):
    """Two convolutions with norms, and a head. All state is random: at the defaults faults hide."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        norm(6, **options),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, bias=False),
        norm(8, **options),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, CLASSES),
    )
    for layer in model:
        if hasattr(layer, "running_var"):
            randomize_(layer)
    return model


def batches(count=6, size=12, shift=0.0, scale=1.0):
    """Batches of noise, with labels."""
    return [(shift + scale * torch.randn(size, 3, 8, 8), torch.randint(CLASSES, (size,))) for _ in range(count)]


def sgd(model, rate=0.02, decay=1e-4, **options):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay, **options)


def step(model, optimizer, x, y):
    """An ordinary step of training."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train(model, optimizer, data):
    for x, y in data:
        step(model, optimizer, x, y)


def codes(ledger):
    """What was found, as a set of (code, layer); info is not a fault."""
    return {(finding.code, finding.layer) for finding in ledger.findings if finding.severity != "info"}


def at_norms(*found):
    return {(code, layer) for code in found for layer in NORMS}
