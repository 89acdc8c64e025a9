"""How far apart the learning rates, and the initial weights, may be that train a net (Ioffe & Szegedy 2015, 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_of_medians, is_complete, verdict, with_range

PLAIN, BN = "plain", "bn"
NETS = (PLAIN, BN)
STEPS = {"quick": 60, "desk": 1000, "full": 10_000}
EVERY = {"quick": 60, "desk": 1000, "full": 2500}  # a measurement costs as much as many steps of so small a net
# Exponents of the grids, in half-decades. The longer a net trains, the lower a rate may be.
RATES = {"quick": range(-7, 4, 2), "desk": range(-9, 4), "full": range(-11, 4)}
SCALES = {"quick": range(-4, 5, 2), "desk": range(-6, 7), "full": range(-6, 7)}
USUAL = {"rate": 0.0316, "scale": 1.0}  # of the one, while the other is varied
HIDDEN = (100,) * 5
TRAINS, TRAINS_WELL = 0.5, 0.9  # of the best accuracy of the seed
NOTES = (
    "A trial trains if it ends with at least half the best accuracy of all trials of its seed; one whose loss is no "
    "longer finite counts as 0. A range is as many steps of the grid as there are points of it that train, gaps left "
    "out; one that holds an end of the grid is at least so wide.",
    "The claim is supported if BN's range is wider in every seed, of rates and of scales, and contradicted if it is "
    "wider in none. Where the narrower of two ranges holds an end of the grid, nothing follows.",
    "Five layers of 100 ReLUs: the cheapest net that is deep enough for a scale to enter six times over. "
    "Both nets start from the same weights, and take SGD without momentum, decay or a schedule.",
    "The scale multiplies all weights, those of the output too, which no norm follows: BN cannot undo it there.",
    "Below its range a rate is too small for so few steps, and more steps move that end; above, the net diverges "
    "or stays at chance.",
    "The grids, and the rate at which scales are varied (both nets train about equally well at it), were chosen after "
    "one run of 600 steps with one seed, so that nets fail at the ends. The rules were written before the first run "
    "of 1000 steps and three seeds. That run was unclear: in one seed the plain net still trained at the lowest rate, "
    "0.0001. The grid was then given one more rate, 0.0000316, and the rules were left as they were.",
)


class LearningRates(Experiment):
    """The same net at many rates, and from weights of many sizes, with Batch Normalization and without."""

    name = "learning-rates"
    claim = "Batch Normalization widens the range of learning rates, and of initial weights, that a net trains with."
    source = "Ioffe & Szegedy 2015, section 3.3"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every rate from the usual weights, and weights of every other size at one rate."""
        shared = {"hidden": list(HIDDEN), "batch": 100, "steps": STEPS[scale]}
        points = [("rate", of(e)) for e in RATES[scale]] + [("scale", of(e)) for e in SCALES[scale] if e != 0]
        return [
            Arm(f"{net}-{key}-{value:g}", shared | USUAL | {"net": net, key: value})
            for key, value in points
            for net in NETS
        ]

    def training(self, trial: Trial) -> Training:
        """SGD on standardized images."""
        settings, found = trial.arm.settings, data.load(trial.data)
        sizes = [found.train.pixels[0].numel(), *settings["hidden"]]
        model = relu_net(nk.BatchNorm1d if settings["net"] == BN else None, sizes, len(found.classes))
        models.initialize_(model, "he", settings["scale"], seed=trial.seed)  # the same for both nets
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
        every = EVERY[trial.scale]
        return Classification(found).training(trial, model, optimizer, lambda step: step > 0 and step % every == 0)

    def findings(self, run: Run) -> Findings:
        """Compare the widths of what trains."""
        scale: Scale = run.header["scale"]
        rates = Sweep(run, "learning rate", "rate", RATES[scale])
        sweeps = (rates, Sweep(run, "initial scale", "scale", SCALES[scale]))
        highest = {net: [found.high for found in rates.ranges(net) if found.high] for net in NETS}
        reasons = [_reason(sweep) for sweep in sweeps]
        if all(highest.values()):
            ratio = median(highest[BN]) / median(highest[PLAIN])
            reasons.append(f"The highest rate that trains is {ratio:.3g} times as high with BN (medians over seeds).")
        holds = [answer for sweep in sweeps for answer in sweep.is_wider()]
        outcome = verdict(holds, is_complete(run, self.arms(scale)))
        tables = [_ranges_table(sweeps), *map(_accuracy_table, sweeps)]
        return Findings(self.claim, self.source, outcome, reasons, tables, [*map(_figure, sweeps)], NOTES)


EXPERIMENT = LearningRates()


def of(halves: int) -> float:
    """A point of a grid, to three digits: 0.0316 is three half-decades below one."""
    return float(f"{10 ** (halves / 2):.3g}")


def relu_net(norm: models.Norm | None, sizes: Sequence[int], classes: int) -> nn.Sequential:
    """A fully connected net of ReLUs, whose output is not normalized."""
    finish = models.Finish(norm)
    hidden = (models.unit(nn.Linear(m, n, bias=finish.bias), n, finish) for m, n in pairwise(sizes))
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))


class Range(NamedTuple):
    """Which part of a grid trains."""

    low: float | None  # None: no part
    high: float | None
    decades: float
    is_cut: bool  # an end of the grid is in it


class Sweep:
    """The trials along one grid."""

    def __init__(self, run: Run, title: str, key: str, halves: range) -> None:
        self.title, self.grid, self._spacing = title, [of(e) for e in halves], halves.step / 2
        ended = [trial for trial in run.trials if trial.end]
        self.seeds = sorted({trial.seed for trial in ended})
        self._best = {seed: max(reached(trial) for trial in ended if trial.seed == seed) for seed in self.seeds}
        self._reached: dict[tuple[str, int, float], float] = {}
        for trial in ended:
            settings = trial.header["settings"]
            if all(settings[other] == usual for other, usual in USUAL.items() if other != key):
                self._reached[settings["net"], trial.seed, settings[key]] = reached(trial)

    def accuracies(self, net: str, value: float) -> list[float]:
        """What the seeds reached at a point of the grid."""
        keys = [(net, seed, value) for seed in self.seeds]
        return [self._reached[key] for key in keys if key in self._reached]

    def ranges(self, net: str, share: float = TRAINS) -> list[Range]:
        """What trains, seed by seed."""
        return [self._range(net, seed, share * self._best[seed]) for seed in self.seeds]

    def is_wider(self) -> list[bool | None]:
        """Whether BN's range is the wider one, seed by seed; None where that is open."""
        return [_is_wider(*pair) for pair in zip(self.ranges(PLAIN), self.ranges(BN), strict=True)]

    def _range(self, net: str, seed: int, level: float) -> Range:
        there = [value for value in self.grid if self._reached.get((net, seed, value), 0.0) >= max(level, 1e-9)]
        if not there:
            return Range(None, None, 0.0, False)
        is_cut = self.grid[0] in there or self.grid[-1] in there
        return Range(there[0], there[-1], len(there) * self._spacing, is_cut)


def reached(trial: TrialRecord) -> float:
    """The accuracy after the last step, 0 if the loss stopped being finite before."""
    return dict(zip(*trial.series("accuracy"), strict=True)).get(trial.header["steps"], 0.0)


def _is_wider(plain: Range, bn: Range) -> bool | None:
    """Open if the narrower range is cut off by the grid: it may be wider than it looks."""
    if bn.decades > plain.decades:
        return None if plain.is_cut else True
    return None if bn.is_cut else False


def _width(ranges: Sequence[Range]) -> str:
    least = "at least " if any(found.is_cut for found in ranges) else ""
    return least + with_range([found.decades for found in ranges], 1)


def _span(ranges: Sequence[Range]) -> str:
    """From where to where it trains in the median seed, by the ends."""
    there = [(found.low, found.high) for found in ranges if found.low is not None and found.high is not None]
    return f"{median(low for low, _ in there):g} to {median(high for _, high in there):g}" if there else "nowhere"


def _reason(sweep: Sweep) -> str:
    plain, bn = sweep.ranges(PLAIN), sweep.ranges(BN)
    wider = sweep.is_wider().count(True)
    return (
        f"Of the {sweep.title}, BN trains over {_width(bn)} decades, {_span(bn)}, and the plain net over "
        f"{_width(plain)}, {_span(plain)}: wider with BN in {wider} of {len(sweep.seeds)} seeds."
    )


def _ranges_table(sweeps: Sequence[Sweep]) -> Table:
    rows = [
        [sweep.title, net, _span(sweep.ranges(net)), *(_width(sweep.ranges(net, s)) for s in (TRAINS, TRAINS_WELL))]
        for sweep in sweeps
        for net in NETS
    ]
    columns = ["varied", "net", "trains from", "decades that train", "decades that come to 90% of the best"]
    note = "Over seeds: medians of the ends; median (range) of the widths. The verdict takes the decades that train."
    return Table("Ranges that train", columns, rows, note)


def _accuracy_table(sweep: Sweep) -> Table:
    rows = [[f"{value:g}", *(with_range(sweep.accuracies(net, value), 3) for net in NETS)] for value in sweep.grid]
    note = "Median (range) over seeds, on test images after the last step; 0: the loss stopped being finite."
    return Table(f"Accuracy by {sweep.title}", [sweep.title, *NETS], rows, note)


def _figure(sweep: Sweep) -> Figure:
    curves = [curve_of_medians(net, [(value, sweep.accuracies(net, value)) for value in sweep.grid]) for net in NETS]
    note = "Median and range over seeds; 0: the loss stopped being finite."
    return Figure(f"Accuracy by {sweep.title}", sweep.title, "accuracy", curves, note, log_x=True)
