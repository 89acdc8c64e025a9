"""An experiment small enough to be killed ten times in a test, with everything in it that a checkpoint must carry."""

import itertools

import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Arm, Experiment, Training, Trial
from normkit.lab.findings import Findings


def probes(loss):
    """Those that remember something from one recorded step to the next, and one that evaluates the loss."""
    p = nk.probes
    return [p.ActivationMoments(), p.StatisticsNoise(), p.EffectiveRate(), p.Landscape(loss, points=2)]


class Toy(Experiment):
    name = "toy"
    claim = "A line can be drawn."
    source = "nowhere"

    def __init__(self, steps=60, pause=None):
        self.steps, self.pause = steps, pause

    def arms(self, scale):
        return [Arm("adam", {"rate": 0.01}), Arm("sgd", {"rate": 0.1}), Arm("explodes", {"rate": 1e30})]

    def training(self, trial):
        # Dropout draws from the global random state, BN has buffers, momentum and Adam have a state of their own.
        model = nn.Sequential(
            nn.Linear(4, 16), nk.BatchNorm1d(16, activation="relu"), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        kind = torch.optim.Adam if trial.arm.name == "adam" else torch.optim.SGD
        options = {} if kind is torch.optim.Adam else {"momentum": 0.9}
        rate = trial.arm.settings["rate"]
        images = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
        labels = images.argmax(1).clamp(max=2)

        def batches(start):
            for step in itertools.count(start):
                pick = torch.randint(64, (16,), generator=torch.Generator().manual_seed(1000 * trial.seed + step))
                if self.pause is not None:
                    self.pause()
                yield images[pick], labels[pick]

        return Training(
            model,
            kind(model.parameters(), lr=rate, **options),
            batches,
            self.steps,
            lambda step: step % 10 == 0,
            lambda model: {"accuracy": float((model(images).argmax(1) == labels).float().mean())},
            rate=lambda step: rate * 0.99**step,
            chance=0.34,
            probes=probes if trial.arm.name == "sgd" else None,
        )

    def findings(self, run):
        return Findings(self.claim, self.source, "unclear", [])


def trial_of(arm, seed=0, steps=60):
    toy = Toy(steps)
    return Trial("toy", next(a for a in toy.arms("quick") if a.name == arm), seed, "quick", "none")


EXPERIMENT = Toy()
