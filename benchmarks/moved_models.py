"""Models whose statistics no longer fit: accuracy as they are, recalibrated and adapted, on the lab's own images.

A small VGG with BatchNorm is trained on fashion-mini; then its weights are averaged or pruned, or its images change.
Statistics and entropy steps see 2,000 training images without labels, changed as the test images are; accuracy is
that of the 2,000 test images, which nothing else sees.
"""

import copy
import json
import sys
from statistics import median

import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import normkit as nk
from normkit.lab import data, models
from normkit.lab.data.transforms import standardized
from normkit.surgery.statistics.adapt import adapt
from normkit.surgery.statistics.recalibrate import recalibrate

SEEDS = (0, 1, 2)
STEPS, BATCH, RATE = 1500, 32, 0.02
AVERAGED_FROM, AVERAGED_EVERY = 750, 50
UNLABELLED, CALIBRATION_BATCH = 2000, 100
FEW = (8, 32, 128)  # examples of the new domain, in one batch
PRIORS = (0, 16)


def noisy(pixels):
    generator = torch.Generator().manual_seed(5)
    return (pixels + 64 * torch.randn(pixels.shape, generator=generator)).clamp(0, 255)


DOMAINS = {
    "inverted": lambda pixels: 255 - pixels,
    "contrast x 0.3": lambda pixels: 0.3 * pixels,
    "noise, deviation 64 of 255": noisy,
}


class Task:
    """The images, and a net trained on them."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        found = data.load("fashion-mini")
        self.prepare = standardized(found.train.pixels)
        self.train, self.test = found.train, found.test
        chosen = torch.randperm(len(found.train.labels))[:UNLABELLED]
        self.unlabelled = found.train.pixels[chosen]  # bytes: what is prepared is a copy
        self.model = models.vgg(nk.BatchNorm2d, in_channels=1, classes=len(found.classes), width=8, init="he")
        self.model.to(memory_format=torch.channels_last)
        self.averaged = AveragedModel(self.model)
        self._fit(seed)

    def _fit(self, seed):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        each = data.batches(self.train, BATCH, seed, 0, lambda pixels, _: self.prepare(pixels))
        for step, (x, y) in zip(range(1, STEPS + 1), each, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            optimizer.step()
            if step > AVERAGED_FROM and step % AVERAGED_EVERY == 0:
                self.averaged.update_parameters(self.model)

    def batches(self, change=lambda pixels: pixels, count=UNLABELLED, size=CALIBRATION_BATCH):
        """Training images without labels, changed."""
        return list(self.prepare(change(self.unlabelled[:count].float())).split(size))

    @torch.no_grad()
    def accuracy(self, model, change=lambda pixels: pixels):
        """In %, in evaluation, on changed test images."""
        images = self.prepare(change(self.test.pixels.float()))
        right = copy.deepcopy(model).eval()(images).argmax(1) == self.test.labels
        return 100 * right.float().mean().item()


def pruned(model, amount):
    """The model without the smallest of its weights, over all layers together."""
    model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # torch's pruning takes no other
    weights = [(m, "weight") for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    prune.global_unstructured(weights, prune.L1Unstructured, amount=amount)
    for module, name in weights:
        prune.remove(module, name)
    return model.to(memory_format=torch.channels_last)


def rows(task):
    """Model, change of its images, and what to call it."""
    yield "as trained", task.model, lambda pixels: pixels
    yield "weights averaged (SWA)", task.averaged, lambda pixels: pixels
    for amount in (0.3, 0.6, 0.8):
        yield f"{amount:.0%} of weights pruned", pruned(task.model, amount), lambda pixels: pixels
    for name, change in DOMAINS.items():
        yield name, task.model, change


def measured(task):
    """Accuracy in %, by model and by what was done to it."""
    found = {}
    for name, model, change in rows(task):
        batches = task.batches(change)
        done = {
            "as it is": model,
            "recalibrate": recalibrate(model, batches).model,
            "adapt, adabn": adapt(model, batches).model,
            "adapt, tent": adapt(model, batches, "tent").model,
        }
        found[name] = {how: task.accuracy(one, change) for how, one in done.items()}
    return found


def with_few(task):
    """Accuracy in % after adabn on a single small batch of a new domain."""
    found = {}
    for name, change in DOMAINS.items():
        for prior in PRIORS:
            adapted = {
                f"{count} images": adapt(task.model, task.batches(change, count, count), prior=prior).model
                for count in FEW
            }
            found[f"{name}, prior {prior}"] = {how: task.accuracy(one, change) for how, one in adapted.items()}
    return found


def print_table(title, seeds):
    """Median and range over seeds, in markdown."""
    columns = list(next(iter(seeds[0].values())))
    print(f"\n| {title} | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for row in seeds[0]:
        values = [[seed[row][column] for seed in seeds] for column in columns]
        print(f"| {row} | {' | '.join(f'{median(v):.1f} ({min(v):.1f} to {max(v):.1f})' for v in values)} |")


def main():
    torch.set_num_threads(1)
    moved, few = [], []
    for seed in SEEDS:
        task = Task(seed)
        moved.append(measured(task))
        few.append(with_few(task))
        print(json.dumps({"seed": seed, "moved": moved[-1], "few": few[-1]}), file=sys.stderr, flush=True)
    print_table("test accuracy, %", moved)
    print_table("adabn on one batch", few)


if __name__ == "__main__":
    main()
