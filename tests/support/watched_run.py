"""A small training run, to be watched or not: everything in it that a probe could disturb."""

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk

CLASSES = 5


def small_net(norm=nk.BatchNorm2d):
    """Convolutions, norms, dropout; a ReLU as a module, so that it can be seen."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        norm(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(6, 8, 3),
        norm(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, CLASSES),
    )


class WatchedRun:
    """A model, its optimizer and its batches; `loss` is that of the present batch."""

    def __init__(self, model, seed=0, rate=0.05, momentum=0.9, decay=1e-3, shape=(3, 8, 8), classes=CLASSES):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
        self.images = torch.randn(40, *shape, generator=torch.Generator().manual_seed(seed))
        self.labels = torch.arange(40) % classes
        self.batch = None
        self.losses = []

    def output(self, x):
        found = self.model(x)
        return getattr(found, "logits", found)

    def loss(self):
        x, y = self.batch
        return F.cross_entropy(self.output(x), y)

    def choose(self, number):
        """Make a step's batch the present one."""
        pick = torch.arange(12 * number, 12 * number + 12) % 40
        self.batch = self.images[pick], self.labels[pick]

    def step(self, number):
        self.choose(number)
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, steps):
        for number in range(steps):
            self.step(number)

    def all_probes(self):
        """One probe of every kind."""
        p = nk.probes
        return [
            p.ActivationQuantiles(),
            p.ActivationMoments(),
            p.GradientNorms(),
            p.DeadUnits(),
            p.StatisticsNoise(),
            p.EffectiveRate(),
            p.Landscape(self.loss, points=2),
            p.CovariateShift(self.loss),
            p.BatchCoupling(self.images, 4, examples=2, draws=2),
            p.BoundaryDistances(self.images[:4], units=3),
        ]
