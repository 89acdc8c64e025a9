"""How far re-estimated statistics are from the population's, and how long they take; batches of unequal sizes.

The population's are those of all values together, in a float64 copy of the model. The error is the worst over
channels: of the mean in standard deviations, of the variance as a share of it.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from normkit.lab import models

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # networks and baselines are shared with the tests
from support.population_baselines import CONTESTANTS, errors, uneven_batches

ROUNDS = 7


def print_errors(title, found):
    names = list(found)
    print(f"| {title} | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for layer in found[names[0]]:
        print(f"| {layer} | {' | '.join(f'{found[name][layer]:.1e}' for name in names)} |")
    print()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.vgg(nn.BatchNorm2d, width=8, init="he")
    for title, moving in (("batches of one distribution", 0.0), ("of different ones", 1.0)):
        batches = uneven_batches((3, 32, 32), moving=moving)
        print_errors(title, errors(model, batches))
    seconds = {name: [] for name in CONTESTANTS}
    for _ in range(ROUNDS):
        for name, run in CONTESTANTS.items():
            start = time.perf_counter()
            run(model, batches)
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times) * 1e3:.0f} ms (median of {ROUNDS})")


if __name__ == "__main__":
    main()
