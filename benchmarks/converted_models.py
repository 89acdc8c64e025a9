"""What conversion does to a trained net: accuracy and logits right after it, with gamma and beta copied and fitted.

A small net with BatchNorm is trained on fashion-mini; then its norms become others, and nothing is trained after that.
They are fitted on 512 training images; the 2,000 test images, which nothing else sees, give the figures. With
`--architectures`, instead: networks of pytorchcv to SyncBatchNorm and back, compared bit for bit.
"""

import argparse
import copy
import importlib.util
import json
import sys
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # networks and baselines are shared with the tests
import normkit as nk
from normkit.lab import data
from normkit.lab.data.transforms import standardized
from normkit.surgery.parity import difference
from support.architectures import ARCHITECTURES

SEEDS = (0, 1, 2)
STEPS, BATCH, RATE = 250, 64, 0.05
FITTED_ON, CALIBRATION_BATCH = 512, 64
CONVERSIONS = {
    '`"layer"`': ("layer", {}),
    '`"group", groups=2`': ("group", {"groups": 2}),
    '`"group", groups=4`': ("group", {"groups": 4}),
    '`"group", groups=8`': ("group", {"groups": 8}),
    '`"group"`: 8 and 16 groups of 2 channels': ("group", {}),
    '`"filter-response"`': ("filter-response", {}),
    '`"instance"`': ("instance", {}),
}
ROUND_TRIPS = (
    *("resnet18", "mobilenetv2_wd4", "efficientnet_b0", "densenet121"),
    *("shufflenetv2_wd2", "hrnet_w18_small_v1", "ibn_resnet50", "peleenet"),
)


def block(inputs, outputs, stride=1):
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


class Task:
    """The images, a net trained on them, and what it says of the test images."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        found = data.load("fashion-mini")
        prepare = standardized(found.train.pixels)
        chosen = torch.randperm(len(found.train.labels))[:FITTED_ON]
        self.calibration = prepare(found.train.pixels[chosen]).split(CALIBRATION_BATCH)
        self.images, self.labels = prepare(found.test.pixels), found.test.labels
        body = [*block(1, 16), *block(16, 32, stride=2), *block(32, 32)]
        self.model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(found.classes)))
        self._fit(data.batches(found.train, BATCH, seed, 0, lambda pixels, _: prepare(pixels)))
        self.logits = self.answers(self.model)

    def _fit(self, batches):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _, (x, y) in zip(range(STEPS), batches, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def answers(self, model):
        """Logits of the test images, in evaluation."""
        model.eval()
        return torch.cat([model(images) for images in self.images.split(500)])

    def accuracy(self, logits):
        """Share of the test images whose largest logit is their label's."""
        return (logits.argmax(1) == self.labels).float().mean().item()

    def error(self, logits):
        """Root of the mean square, over the logits' deviation: 1 for who says the mean logits whatever the image."""
        spread = (self.logits - self.logits.mean(0)).square().mean()
        return ((logits - self.logits).square().mean() / spread).sqrt().item()


def measured(task):
    """Accuracy and error of the logits, by conversion, copied and fitted."""
    found = {}
    for name, (to, options) in CONVERSIONS.items():
        copied = task.answers(nk.convert(task.model, to, **options).model)
        fitted = task.answers(nk.convert(task.model, to, calibrate=task.calibration, **options).model)
        found[name] = {
            "accuracy, copied": task.accuracy(copied),
            "accuracy, fitted": task.accuracy(fitted),
            "error of the logits, copied": task.error(copied),
            "error of the logits, fitted": task.error(fitted),
        }
    return found


def over_seeds(values):
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_conversions():
    """Median and range over seeds, in markdown."""
    seeds, originals = [], []
    for seed in SEEDS:
        task = Task(seed)
        seeds.append(measured(task))
        originals.append(task.accuracy(task.logits))
        record = {"seed": seed, "accuracy": originals[-1], "converted": seeds[-1]}
        print(json.dumps(record), file=sys.stderr, flush=True)
    columns = list(next(iter(seeds[0].values())))
    print(f"\nAccuracy before conversion: {over_seeds(originals)}\n")
    print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for row in CONVERSIONS:
        print(f"| {row} | {' | '.join(over_seeds([seed[row][column] for seed in seeds]) for column in columns)} |")


def in_bytes(tensor):
    return tensor.dtype, tensor.shape, tensor.detach().numpy().tobytes()


@torch.no_grad()
def aspects(model, example):
    """What must come back: every bit of the outputs and of the state, the classes, and the options, as printed."""
    return {
        "outputs": in_bytes(model(example)),
        "state": [(name, in_bytes(tensor)) for name, tensor in model.state_dict().items()],
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "options": repr(model),
    }


def moved(model, example):
    """How far evaluation moves, relative to the largest output, as our SyncBatchNorm and as torch's, and in float64.

    Last, for comparison, how far the network itself in float32 is from itself in float64: what it makes of rounding.
    """
    wide, wide_example = copy.deepcopy(model).double(), example.double()
    ours, theirs = (nk.convert(model, "sync", example, classes=classes) for classes in ("normkit", "torch"))
    ours64 = nk.convert(wide, "sync", wide_example)
    with torch.no_grad():
        rounding = difference(wide(wide_example), model(example))[1]
    return [f"{rel:.1e}" for rel in (*(there.parity.max_rel for there in (ours, theirs, ours64)), rounding)]


def round_trip(architecture):
    """A network's batch norms, how many go and come back, how far outputs move there, and what is the same after."""
    model, example = architecture.trained(), architecture.example(seed=9)
    before = aspects(model, example)
    there = nk.convert(model, "sync")
    back = nk.convert(there.model, "batch", classes="torch")
    after = aspects(back.model, example)
    batch_norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    same = ["same" if after[aspect] == before[aspect] else "differs" for aspect in before]
    return [batch_norms, len(there.changed), len(back.changed), *same, *moved(model, example)]


def print_round_trips():
    if importlib.util.find_spec("pytorchcv") is None:
        sys.exit("--architectures needs pytorchcv, which is not installed.")
    heads = ["network", "batch norms", "to sync", "back", "outputs", "state", "classes", "options"]
    heads += [
        "moved as nk.SyncBatchNorm",
        "as nn.SyncBatchNorm",
        "as nk.SyncBatchNorm, float64",
        "float32 from float64",
    ]
    print("| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), sep="\n")
    by_name = {architecture.name: architecture for architecture in ARCHITECTURES}
    rows = []
    for name in ROUND_TRIPS:
        rows.append(round_trip(by_name[name]))
        print(f"| {name} | {' | '.join(map(str, rows[-1]))} |", flush=True)
    sums = [sum(row[column] for row in rows) for column in range(3)]
    print(f"\n{len(rows)} networks: {sums[0]} batch norms, {sums[1]} to SyncBatchNorm, {sums[2]} back")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", action="store_true", help="round trips of networks of pytorchcv instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.architectures:
        print_round_trips()
    else:
        print_conversions()


if __name__ == "__main__":
    main()
