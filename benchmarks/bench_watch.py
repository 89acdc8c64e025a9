"""What watch adds to a training step: a ResNet-18 at 64x64, batches of 32, with and without it in turns.

Seconds are those of the processor, on one thread: what else runs on the machine does not count.

python benchmarks/bench_watch.py [rounds]
"""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.lab import models

BATCH, SIZE, STEPS = 32, 64, 2


class Run:
    """A ResNet-18, a step at a time."""

    def __init__(self, norm):
        self.model = models.resnet18(norm, classes=10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.x, self.y = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH) % 10

    def steps(self):
        """Train some steps; return the seconds of one."""
        start = time.process_time()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()
        return (time.process_time() - start) / STEPS


def ratios(run, rounds):
    """Seconds of a watched step over those of an unwatched one, round by round; which comes first alternates."""
    found = []
    for number in range(rounds):
        seconds = {}
        for is_watched in (False, True) if number % 2 else (True, False):
            if is_watched:
                ledger = nk.watch(run.model, optimizer=run.optimizer)
                seconds[True] = run.steps()
                ledger.close()
                assert ledger.stopped is None, ledger.stopped
            else:
                seconds[False] = run.steps()
        found.append(seconds[True] / seconds[False])
    return found


def main():
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for name, norm in (("torch's BatchNorm2d", nn.BatchNorm2d), ("normkit's", nk.BatchNorm2d)):
        run = Run(norm)
        step = run.steps()
        found = ratios(run, rounds)
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name}: a step of {step:.3f} s takes {middle:.4f} times that ({low:.4f} to {high:.4f})", flush=True)


if __name__ == "__main__":
    main()
