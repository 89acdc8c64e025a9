"""Stored statistics under a shift of the data, estimated anew, and entropy steps (Li et al. 2016; Wang et al. 2021)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from normkit.figures.figure import Curve, Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.data.transforms import Prepare, standardized
from normkit.lab.data.types import DataSet
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.measures import accuracy
from normkit.lab.probed import agreed
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import is_complete, verdict, with_range

BATCH, GROUP = "batch", "group"
NORMS: dict[str, models.Norm] = {BATCH: nk.BatchNorm2d, GROUP: partial(nk.GroupNorm, 4)}
STEPS = {"quick": 20, "desk": 1500, "full": 20_000}
RATE, MOMENTUM = 0.1, 0.9
IMAGES = {"quick": 64, "desk": 1000, "full": 1000}  # of the test set, to adapt to; as many others to measure with
FEW = {"quick": (8, 32), "desk": (8, 32, 128, 512), "full": (8, 32, 128, 512)}  # images to adapt to
SIZE = 100  # of a batch to adapt to
COST = 0.05  # of accuracy: what a shift must cost to be called one
SHARE, LITTLE = 0.5, 0.25  # of the cost
NOTES = (
    "What a shift costs is the accuracy of the trained net on test images less that on the same images shifted, with "
    "stored statistics; what a method recovers is the share of that cost by which it raises the accuracy. Medians are "
    f"over the six shifts. (a) holds in a seed if the median cost is more than {100 * COST:g} points, else it fails. "
    f"(b) holds if adabn's median share is at least {SHARE:g}, and fails if it is less than {LITTLE:g}. (c) holds if "
    "the median of what tent adds to adabn's accuracy is positive, else it fails. Supported: all parts hold in every "
    "seed. Contradicted: one part fails in every seed.",
    "Methods adapt to one half of the shifted test images, without labels, and are measured on the other half. What "
    "`adapt` rolls back counts as not adapted.",
    'Shifts are those of a camera, at one strength each: "contrast" and "dark" take 70% of the range and of the light, '
    '"fog" lays a bright veil over the image, "noise" is Gaussian with a deviation of 50 of 255, "blur" averages five '
    'by five pixels. "inverted" is white for black: the statistics move, but so does what the pixels mean.',
    "That statistics do not repair inverted images was known from a network of another experiment, and so was that "
    "they repair contrast and noise. It is among the six all the same. Strengths were set before any was tried here.",
    "group is the same net with group norms, which store no statistics: for comparison, and not part of the verdict.",
    "The net: eight layers in residual blocks of 8 to 32 channels; SGD at a rate that falls linearly to 0. tent takes "
    "one step of Adam at 0.001 a batch of 100, once through the images.",
)


class Shift(Experiment):
    """A net meets images unlike those it was trained on, as it is and adapted."""

    name = "shift"
    claim = (
        "(a) Running statistics break under a shift of the distribution; (b) estimating them anew, without labels, "
        "recovers at least half of what that costs, (c) and steps that lower the entropy of predictions recover more."
    )
    source = "Li et al. 2016 (AdaBN); Wang et al. 2021 (TENT)"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """With stored statistics, and without."""
        shared = {"batch": 64, "rate": RATE, "momentum": MOMENTUM, "steps": STEPS[scale]}
        return [Arm(norm, shared | {"norm": norm, "few": list(FEW[scale])}) for norm in NORMS]

    def training(self, trial: Trial) -> Training:
        """SGD; everything is measured at the end."""
        settings, found = trial.arm.settings, data.load(trial.data)
        images = Classification(found)
        model = images.small_resnet(NORMS[settings["norm"]], trial.seed)
        training = images.falling_training(trial, model, lambda step: False)
        shifted = Shifted(found, IMAGES[trial.scale], trial.seed)
        training.measure = lambda model: shifted.measure(model, settings["norm"] == BATCH, settings["few"])
        return training

    def findings(self, run: Run) -> Findings:
        """Compare what shifts cost with what is recovered."""
        ended = [trial for trial in run.of(BATCH) if trial.end and trial.measured]
        parts = [
            agreed([middle(costs(trial)) > COST for trial in ended]),
            agreed([recovers_enough(middle(shares(trial, "adabn"))) for trial in ended]),
            agreed([middle(added(trial)) > 0 for trial in ended]),
        ]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [_cost_reason(ended), _share_reason(ended), _tent_reason(ended)],
            [_table(ended), _group_table(run)],
            _figures(ended),
            NOTES,
        )


EXPERIMENT = Shift()


# ---- shifts

Change = Callable[[Tensor, torch.Generator], Tensor]  # of pixels, float from 0 to 255, (N, C, H, W)


def _blurred(pixels: Tensor, _: torch.Generator) -> Tensor:
    return F.avg_pool2d(pixels, 5, stride=1, padding=2, count_include_pad=False)


SHIFTS: dict[str, Change] = {
    "contrast": lambda pixels, _: 127.5 + 0.3 * (pixels - 127.5),
    "dark": lambda pixels, _: 0.3 * pixels,
    "fog": lambda pixels, _: 0.5 * pixels + 100,
    "noise": lambda pixels, generator: pixels + 50 * torch.randn(pixels.shape, generator=generator),
    "blur": _blurred,
    "inverted": lambda pixels, _: 255 - pixels,
}


def shifted_pixels(name: str, pixels: Tensor, seed: int) -> Tensor:
    """Pixels as another camera would have seen them, from 0 to 255."""
    return SHIFTS[name](pixels.float(), torch.Generator().manual_seed(seed)).clamp(0, 255)


class Shifted:
    """Test images in two halves: one to adapt to, one to measure with."""

    def __init__(self, found: DataSet, images: int, seed: int) -> None:
        chosen = torch.randperm(len(found.test.labels), generator=torch.Generator().manual_seed(seed))[: 2 * images]
        self._pixels, self._labels = found.test.pixels[chosen], found.test.labels[chosen[images:]]
        self._prepare: Prepare = standardized(found.train.pixels)
        self._images, self._seed = images, seed

    def measure(self, model: nn.Module, has_statistics: bool, few: Sequence[int]) -> dict[str, Any]:
        """The accuracies on images as they are, and shifted in each way, without and with adaptation."""
        plain = self._prepare(self._pixels[self._images :])
        return {
            "accuracy": accuracy(model, plain, self._labels),
            "shifts": {name: self._adapted(model, name, has_statistics, few) for name in SHIFTS},
        }

    def _adapted(self, model: nn.Module, name: str, has_statistics: bool, few: Sequence[int]) -> dict[str, Any]:
        images = self._prepare(shifted_pixels(name, self._pixels, self._seed))
        unlabeled, measured = images[: self._images], images[self._images :]
        found: dict[str, Any] = {"as_it_is": accuracy(model, measured, self._labels)}
        if not has_statistics:
            return found

        def adapted(count: int, method: Any) -> tuple[float, bool]:
            with torch.enable_grad(), warnings.catch_warnings():  # entropy steps need gradients
                warnings.simplefilter("ignore", nk.NormkitWarning)  # what is rolled back is in the record
                surgery = nk.adapt(model, list(unlabeled[:count].split(SIZE)), method)
            return accuracy(surgery.model.eval(), measured, self._labels), not surgery.changed

        found["adabn"], found["adabn_rolled_back"] = adapted(self._images, "adabn")
        found["tent"], found["tent_rolled_back"] = adapted(self._images, "tent")
        found["few"] = [adapted(count, "adabn")[0] for count in few]
        return found


# ---- what the records say

Numbers = Mapping[str, float]  # by shift


def costs(trial: TrialRecord) -> Numbers:
    """What each shift takes from the accuracy."""
    end = trial.measured[-1]
    return {name: end["accuracy"] - found["as_it_is"] for name, found in end["shifts"].items()}


def shares(trial: TrialRecord, method: str) -> Numbers:
    """The share of each shift's cost that a method recovers; of a shift that costs nothing there is none."""
    found = trial.measured[-1]["shifts"]
    return {
        name: (found[name][method] - found[name]["as_it_is"]) / cost for name, cost in costs(trial).items() if cost > 0
    }


def added(trial: TrialRecord) -> Numbers:
    """What tent adds to the accuracy of adabn."""
    return {name: found["tent"] - found["adabn"] for name, found in trial.measured[-1]["shifts"].items()}


def middle(numbers: Numbers) -> float:
    """The median over shifts; NaN if there are none."""
    return median(numbers.values()) if numbers else nan


def recovers_enough(share: float) -> bool | None:
    """(b) At least half; None if it is less, but not little, or if nothing was lost."""
    return True if share >= SHARE else False if share < LITTLE else None


def _percent(values: Iterable[float], digits: int = 1) -> str:
    return with_range([100 * value for value in values], digits)


def _cost_reason(trials: Sequence[TrialRecord]) -> str:
    found = _percent(middle(costs(trial)) for trial in trials)
    return f"(a) With stored statistics a shift costs {found} points of accuracy, in the median over shifts."


def _share_reason(trials: Sequence[TrialRecord]) -> str:
    found = _percent((middle(shares(trial, "adabn")) for trial in trials), 0)
    return f"(b) Statistics estimated anew recover {found}% of that."


def _tent_reason(trials: Sequence[TrialRecord]) -> str:
    found = _percent(middle(added(trial)) for trial in trials)
    share = _percent((middle(shares(trial, "tent")) for trial in trials), 0)
    rolled = sum(of["tent_rolled_back"] for trial in trials for of in trial.measured[-1]["shifts"].values())
    return (
        f"(c) Entropy steps add {found} points, and recover {share}% in all; {rolled} of "
        f"{len(trials) * len(SHIFTS)} adaptations were rolled back."
    )


def _table(trials: Sequence[TrialRecord]) -> Table:
    rows = []
    for name in SHIFTS:
        ends = [trial.measured[-1]["shifts"][name] for trial in trials]
        cells = [_percent(end[key] for end in ends) for key in ("as_it_is", "adabn", "tent")]
        recovered = [
            _percent((of[name] for of in (shares(trial, method) for trial in trials) if name in of), 0)
            for method in ("adabn", "tent")
        ]
        rows.append([name, *cells, *recovered])
    plain = _percent(trial.measured[-1]["accuracy"] for trial in trials)
    columns = ["shift", "stored statistics", "adabn", "tent", "adabn recovers", "tent recovers"]
    note = (
        f"Accuracy in %, and the share of what the shift costs in %: median (range) over seeds. Not shifted: {plain}."
    )
    return Table("Accuracy under shifts", columns, rows, note)


def _group_table(run: Run) -> Table:
    trials = {norm: [trial for trial in run.of(norm) if trial.end and trial.measured] for norm in NORMS}
    rows = [["none", *(_percent(trial.measured[-1]["accuracy"] for trial in of) for of in trials.values())]]
    for name in SHIFTS:
        rows.append(
            [name, *(_percent(t.measured[-1]["shifts"][name]["as_it_is"] for t in of) for of in trials.values())]
        )
    note = "Accuracy in %, without adaptation: median (range) over seeds. Group norms store no statistics."
    return Table("With statistics and without", ["shift", *NORMS], rows, note)


def _figures(trials: Sequence[TrialRecord]) -> list[Figure]:
    if not trials:
        return []
    few = trials[0].header["settings"]["few"]
    curves = []
    for name in SHIFTS:
        values = [*zip(*(trial.measured[-1]["shifts"][name]["few"] for trial in trials), strict=True)]
        curves.append(Curve(name, few, [*map(median, values)], [*map(min, values)], [*map(max, values)]))
    note = "After adabn: median and range over seeds."
    title = "Accuracy by the number of images that statistics are estimated on"
    return [Figure(title, "images", "accuracy", curves, note, log_x=True)]
