"""What each probe takes at a recorded step, over a training step without probes: one thread, in one run.

python benchmarks/bench_probes.py [docs/records/probes.json]
"""

import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional as F

import normkit as nk
from normkit.environment import describe_environment
from normkit.lab import models

ROUNDS, BATCH = 9, 32


class Run:
    """A ResNet-18 on small images, a step at a time."""

    def __init__(self):
        self.model = models.resnet18(nk.BatchNorm2d, classes=10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.x, self.y = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10

    def loss(self):
        """Of the batch."""
        return F.cross_entropy(self.model(self.x), self.y)

    def step(self):
        """Train one step; return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        return time.perf_counter() - start


def probes(run):
    p = nk.probes
    return [
        p.ActivationQuantiles(),
        p.ActivationMoments(),
        p.StatisticsNoise(),
        p.DeadUnits(),
        p.GradientNorms(),
        p.EffectiveRate(),
        p.Landscape(run.loss),
        p.CovariateShift(run.loss),
        p.BatchCoupling(run.x, 8),
        p.BoundaryDistances(run.x[:8]),
    ]


def ratios(run, probe):
    """The probe's own time over that of a step without it, round by round."""
    found = []
    for _ in range(ROUNDS):
        plain = run.step()
        with nk.attach(run.model, probe, every=1, optimizer=run.optimizer) as recorder:
            run.step()
        assert not recorder.stopped, recorder.stopped
        found.append(recorder.costs()[probe.name] / plain)
    return found


def main():
    torch.set_num_threads(1)
    run = Run()
    run.step()
    rows = []
    for probe in probes(run):
        found = ratios(run, probe)
        low, _, high = statistics.quantiles(found, n=4)
        rows.append([f"`{probe.name}`", f"{statistics.median(found):.2g} ({low:.2g} to {high:.2g})"])
        print(*rows[-1], sep="\t", flush=True)
    if len(sys.argv) > 1:
        machine = describe_environment()
        record = {
            "run": f"`benchmarks/bench_probes.py` on {machine['cpu']}, torch {machine['torch']}; {ROUNDS} rounds.",
            "reported": f"Measured on {datetime.now(UTC):%Y-%m-%d}.",
            "tables": [{"title": "", "columns": ["probe", "training steps per recorded step"], "rows": rows}],
        }
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
