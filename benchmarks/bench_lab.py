"""The lab's training steps against a loop written by hand in plain torch: the small Inception, in turns, on one thread.

By hand, the same net has torch's layers and a DataLoader feeds it, as most would write it; in a second version it is in
channels_last as well.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normkit as nk
from normkit.lab import data, models
from normkit.lab.experiment import Trial
from normkit.lab.experiments.inception import EXPERIMENT, RATE
from normkit.lab.models.units import PointwiseConv2d
from normkit.lab.trial import RunOptions, run_trial

ROUNDS = 9
STEPS = 150  # of a turn
WARM = 10


def torchs(module):
    """Put torch's own layers where a net has ours."""
    for name, child in module.named_children():
        if isinstance(child, PointwiseConv2d):
            setattr(module, name, nn.Conv2d(child.in_channels, child.out_channels, 1, bias=child.bias is not None))
        elif isinstance(child, nk.LocalResponseNorm):
            setattr(module, name, nn.LocalResponseNorm(child.size))
        else:
            torchs(child)
    return module


def by_hand(found, arm, layout):
    """Seconds a step of the usual loop."""
    settings = arm.settings
    norm = nn.BatchNorm2d if settings["norm"] else None
    options = {"dropout": settings["dropout"], "lrn": settings["lrn"]}
    model = torchs(models.small_inception(norm, modules=6, **options)).to(memory_format=layout)
    pixels = found.train.pixels.float() / 255
    loader = DataLoader(TensorDataset((pixels - 0.286) / 0.353, found.train.labels), batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=settings["l2"])
    for step, (x, y) in enumerate(loader):
        if step == WARM:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.contiguous(memory_format=layout)), y)
        loss.backward()
        optimizer.step()
        loss.item()
        if step == WARM + STEPS - 1:
            return (time.perf_counter() - start) / STEPS
    raise RuntimeError("too few images")


def in_the_lab(arm):
    """Seconds a step of a trial, all that goes on between two of its steps included."""
    times = []

    def notify(step, *_):
        times.append(time.perf_counter())
        if step == WARM + STEPS:
            raise StopIteration

    trial = Trial("inception", arm, 0, "desk", "fashion-mini")
    with tempfile.TemporaryDirectory() as directory:
        try:
            run_trial(Unmeasured(), trial, RunOptions(Path(directory)), notify)
        except StopIteration:
            return (times[-1] - times[WARM - 1]) / STEPS


class Unmeasured(type(EXPERIMENT)):
    """The experiment without its tests, which the loop by hand has not either."""

    def training(self, trial):
        """Set a trial up."""
        training = super().training(trial)
        training.measure_at = lambda step: False
        return training


def main():
    torch.set_num_threads(1)
    found = data.load("fashion-mini")
    arms = [arm for arm in EXPERIMENT.arms("desk") if arm.name in ("inception", "bn-x5")]
    for arm in arms:
        contestants = {
            "lab": lambda arm=arm: in_the_lab(arm),
            "by hand": lambda arm=arm: by_hand(found, arm, torch.contiguous_format),
            "by hand, channels_last": lambda arm=arm: by_hand(found, arm, torch.channels_last),
        }
        seconds = {name: [] for name in contestants}
        for _ in range(ROUNDS):
            for name, run in contestants.items():
                seconds[name].append(run())
        print(f"{arm.name}: {statistics.median(seconds['lab']) * 1e3:.1f} ms a step in the lab")
        for name in list(contestants)[1:]:
            ratios = sorted(a / b for a, b in zip(seconds[name], seconds["lab"], strict=True))
            low, mid, high = statistics.quantiles(ratios, n=4)
            print(f"  {name:24} {mid:5.2f} times as long (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
