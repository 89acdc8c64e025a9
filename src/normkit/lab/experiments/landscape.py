"""The loss along its gradient, with Batch Normalization and without (Santurkar et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import normkit as nk
from normkit.figures.figure import Cell, Curve, Figure, Table
from normkit.json_lines import Line
from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import Key, agreed, known, paired, probe_median, ratios, settled_accuracy, with_medians
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, verdict, with_range

PLAIN, BN = ARMS = ("plain", "bn")
NETS: dict[Scale, dict[str, Any]] = {
    "quick": {"depth": 11, "width": 4, "batch": 32, "steps": 12},
    "desk": {"depth": 11, "width": 8, "batch": 64, "steps": 1500},
    "full": {"depth": 16, "width": 64, "batch": 128, "steps": 15_000},
}
EVERY = {"quick": 6, "desk": 50, "full": 250}
RATE = 0.1  # the paper's
RATES: dict[Scale, tuple[float, ...]] = {"quick": (RATE,), "desk": (0.03, RATE, 0.3), "full": (0.03, RATE, 0.3)}
SPAN = (0.5, 4.0)  # the paper's, in rates
BETTER = 0.9  # of what the plain net has
PROBE = "Landscape"


class Property(NamedTuple):
    """A property of the landscape, of which less is better: its name, what it is, and where it is in a record."""

    name: str
    what: str
    key: Key


def _width(record: Line) -> float:
    return float(record["loss_high"]) - float(record["loss_low"])


PROPERTIES = (
    Property("loss variation", "highest less lowest loss", _width),
    Property("gradient predictiveness", "greatest change of the gradient", "change_high"),
    Property("effective smoothness", "greatest change of the gradient over the distance", "smoothness"),
)
NOTES = (
    f"From the parameters of a step, 8 steps along the negative gradient are tried, of {SPAN[0]:g} to {SPAN[1]:g} "
    f"times the paper's rate of {RATE:g}, in arms of other rates too, so that all are compared over the same lengths. "
    "All is of the batch of that step. Loss variation is the highest loss less the lowest; gradient predictiveness the "
    "greatest norm of the gradient's change, of which less is more predictive; effective smoothness the greatest ratio "
    "of that to the distance. Of each trial, the median over measured steps counts; what is not a number is left out.",
    f"BN is better in a seed if it has less than {BETTER:g} of what the plain net has; a seed in which either diverged "
    'is open. The verdict is "supported" if BN is better by all three properties in every seed, at the rate of the '
    'paper and with each net at its own best rate; "contradicted" if it is better by none of them in any seed at the '
    'rate of the paper; else "unclear".',
    "The best rate is the one with the highest median accuracy at the end, chosen on the test images, for both nets "
    "alike. The end is the median of the last three evaluations, and 0 for a trial that diverged.",
    "Santurkar et al. publish figures and no numbers: the figures show all three lower with BN. The factors here have "
    "nothing exact to be compared with.",
    "Norms change the scale of gradients, and with it these properties: along the same multiples of the gradient two "
    "nets go different distances. The last column of the second table, the change over the gradient's own norm, is "
    "free of that; the verdict takes the paper's definitions.",
    "SGD at a fixed rate, Glorot's weights, the same for both nets, no augmentation: the paper's. The desk scale's net "
    "is small (8 convolutions of 8 to 64 channels, batches of 64). Rates and steps were chosen after one look at "
    "accuracies over 500 steps, and the rule was written before a landscape had been measured.",
)


class Landscapes(Experiment):
    """Three properties of the loss along its gradient, step by step."""

    name = "landscape"
    claim = (
        "Along the gradient, the loss varies less, gradients are more predictive, and the effective smoothness is "
        "better with Batch Normalization than without."
    )
    source = "Santurkar et al. 2018"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Both nets at the paper's rate and at others."""
        return [
            Arm(f"{norm}-{rate:g}", NETS[scale] | {"norm": norm, "rate": rate})
            for rate in RATES[scale]
            for norm in ARMS
        ]

    def training(self, trial: Trial) -> Training:
        """SGD, and the probe at every measured step."""
        settings, images, every = trial.arm.settings, Classification(data.load(trial.data)), EVERY[trial.scale]
        norm = nk.BatchNorm2d if settings["norm"] == BN else None
        found = images.plain_training(trial, images.vgg(norm, settings), lambda step: step % every == 0)
        found.probes = lambda closure: [nk.probes.Landscape(closure, SPAN, rate=RATE)]
        return found

    def findings(self, run: Run) -> Findings:
        """Compare at the paper's rate, and each net at its best."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        rates = RATES[run.header["scale"]]
        usual = Compared(ended, dict.fromkeys(ARMS, RATE), "at the paper's rate")
        best = Compared(ended, {norm: _best_rate(ended, norm, rates) for norm in ARMS}, "each at its best rate")
        complete = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict(usual.is_better(), complete, also=best.is_better()),
            [usual.reason(), best.reason()],
            [_factor_table([usual, best]), _arm_table(ended, rates)],
            _figures(run),
            NOTES,
        )


EXPERIMENT = Landscapes()


# ---- what the records say


def _number(key: Key) -> Callable[[TrialRecord], float | None]:
    return lambda trial: probe_median(trial, PROBE, key)


def _best_rate(run: Run, norm: str, rates: Sequence[float]) -> float:
    """The rate at which a net ends highest; the paper's while nothing has ended."""
    ends = {rate: [settled_accuracy(trial) for trial in run.of(f"{norm}-{rate:g}")] for rate in rates}
    return max((rate for rate in rates if ends[rate]), key=lambda rate: median(ends[rate]), default=RATE)


class Compared:
    """BN against the plain net, each at a rate."""

    def __init__(self, run: Run, rates: dict[str, float], title: str) -> None:
        self.title = f"{title} ({', '.join(f'{norm} {rate:g}' for norm, rate in rates.items())})"
        self._pairs = paired(run, *(f"{norm}-{rates[norm]:g}" for norm in (BN, PLAIN)))

    def factors(self, key: Key) -> list[float | None]:
        """What BN has over what the plain net has, seed by seed."""
        return ratios(self._pairs, _number(key))

    def is_better(self) -> list[bool | None]:
        """Whether BN is better by each property; None where seeds disagree or a net diverged."""
        found = [self.factors(of.key) for of in PROPERTIES]
        return [agreed([None if factor is None else factor < BETTER for factor in factors]) for factors in found]

    def reason(self) -> str:
        """What is found, in a sentence."""
        said = [f"{of.name} {with_range(known(self.factors(of.key)), 2)} times the plain net's" for of in PROPERTIES]
        return f"BN {self.title}: {', '.join(said)}; {len(self._pairs)} seeds."


def _factor_table(compared: Sequence[Compared]) -> Table:
    rows = [[of.name, of.what, *(with_range(known(pair.factors(of.key)), 3) for pair in compared)] for of in PROPERTIES]
    columns = ["property", "which is the", *(pair.title for pair in compared)]
    note = (
        "What the net with BN has over what the plain net has: median (range) over seeds. Less than 1 is better. The "
        "paper's figures show all three lower with BN, and give no numbers."
    )
    return Table("BN over plain", columns, rows, note)


def _arm_table(run: Run, rates: Sequence[float]) -> Table:
    def relative(record: Line) -> float | None:
        return float(record["change_high"]) / float(record["gradient"]) if record["gradient"] else None

    keys: list[Key] = [*(of.key for of in PROPERTIES), "gradient", relative]
    rows: list[list[Cell]] = []
    for rate in rates:
        for norm in ARMS:
            trials = run.of(f"{norm}-{rate:g}")
            ends = with_range([100 * settled_accuracy(trial) for trial in trials], 2)
            rows.append([norm, rate, ends, *(with_range(known([_number(key)(t) for t in trials]), 3) for key in keys)])
    columns = ["net", "rate", "accuracy", *(of.name for of in PROPERTIES), "gradient", "greatest change / gradient"]
    note = "Median (range) over seeds; of a seed, the median over measured steps. Accuracy in %, at the end."
    return Table("By rate", columns, rows, note)


def _figures(run: Run) -> list[Figure]:
    trials = {norm: [_with_landscape(trial) for trial in run.of(f"{norm}-{RATE:g}")] for norm in ARMS}
    note = f"At a rate of {RATE:g}. The band is from the lowest to the highest along the gradient: medians over seeds."

    def bands(title: str, y_title: str, *keys: str) -> Figure:
        curves = [_band(norm, of, *keys) for norm, of in trials.items()]
        return Figure(f"{title} along the gradient", "steps", y_title, curves, note)

    smooth = [curve_over_seeds(norm, of, "smoothness") for norm, of in trials.items()]
    of_seeds = f"At a rate of {RATE:g}: median and range over seeds."
    return [
        bands("Loss", "loss", "landscape_loss", "loss_low", "loss_high"),
        bands("Change of the gradient", "norm of the change", "change", "change_low", "change_high"),
        Figure("Effective smoothness", "steps", "change / distance", smooth, of_seeds),
    ]


def _with_landscape(trial: TrialRecord) -> TrialRecord:
    """The trial with the probe's numbers in its lines; its own "loss" is the mean over the steps before."""
    same = ("loss_low", "loss_high", "change_low", "change_high", "smoothness")
    keys: dict[str, Key] = {key: key for key in same}
    keys["landscape_loss"] = "loss"
    keys["change"] = lambda record: (float(record["change_low"]) + float(record["change_high"])) / 2
    return with_medians(trial, PROBE, keys)


def _band(name: str, trials: Sequence[TrialRecord], middle: str, low: str, high: str) -> Curve:
    """The middle with a band from low to high: each the median over seeds."""
    curve, lowest, highest = (curve_over_seeds(name, trials, key) for key in (middle, low, high))
    return Curve(name, curve.x, curve.y, lowest.y, highest.y)
