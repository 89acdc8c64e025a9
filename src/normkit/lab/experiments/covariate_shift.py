"""Whether Batch Normalization reduces internal covariate shift, by the measure of Santurkar et al. 2018."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.instruments.loss import Closure
from normkit.instruments.probe import Probe, has_weight
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.data.randomness import generator
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.deep_linear import deep_linear
from normkit.lab.probed import agreed, known, paired, probe_median, ratios, with_medians
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range

VGG, LINEAR = "vgg", "linear"
PLAIN, BN = "plain", "bn"
NETS: dict[Scale, dict[str, dict[str, Any]]] = {
    "quick": {
        VGG: {"depth": 11, "width": 4, "batch": 32, "steps": 12, "every": 6},
        LINEAR: {"layers": 6, "width": 10, "samples": 100, "steps": 12, "every": 6},
    },
    "desk": {
        VGG: {"depth": 11, "width": 8, "batch": 64, "steps": 1500, "every": 75},
        LINEAR: {"layers": 25, "width": 10, "samples": 1000, "steps": 5000, "every": 250},
    },
    "full": {
        VGG: {"depth": 16, "width": 64, "batch": 128, "steps": 15_000, "every": 250},
        LINEAR: {"layers": 25, "width": 10, "samples": 1000, "steps": 10_000, "every": 250},
    },
}
RATES = {VGG: (0.1, 0.01), LINEAR: (1e-6, 1e-7)}  # the paper's
SMALLER = 0.9  # of the plain net's shift
PROBE = "CovariateShift"
KEYS = ("relative", "cosine", "shift")
NOTES = (
    "With G a layer's gradient before an update, and G' the same on the same batch once the layers before it have been "
    "updated, the shift is |G - G'| (definition 2.1). It is taken here over |G|, because nets with and without norms "
    "have gradients of different sizes. Of each trial, the median over layers and measured steps counts. Measured are "
    "the matrices and convolutions but for the first, which has no layer before it; norms move, and are not measured.",
    f"BN's shift is smaller in a seed if it is less than {SMALLER:g} of the plain net's; a seed in which either "
    'diverged is open. The verdict is "supported" if it is smaller in every seed of every pair of nets, "contradicted" '
    'if it is smaller in none, else "unclear": a shift that is merely similar does not support that BN reduces it. '
    "Cosines, absolute shifts, accuracies and losses are reported, and are not part of the verdict.",
    "This measure is not that of the 2015 paper, which defines the shift as a change of the distribution of "
    "activations, and shows it in figure 1 alone. Santurkar et al. found a similar or larger shift with BN, in nets "
    "that train better; in the deep linear net nearly none without BN, and with BN nearly uncorrelated gradients.",
    "The deep linear net fits Ax, with A and 1000 vectors x Gaussian, by full batches: the sum of squares over all "
    "vectors is the loss, which at the paper's rates is the reading that trains. It does not depend on the data set. "
    "BN follows each of its matrices but the last. With BN and without, nets start from the same weights (Glorot).",
    "The VGG net is small at the desk scale: 8 convolutions of 8 to 64 channels, batches of 64. Rates are the paper's. "
    "Steps were chosen after one look at 500 and 1000 steps with one or two seeds, at accuracies and losses alone: "
    "at all rates all nets train. The rule was written before any shift had been measured.",
)


class InternalCovariateShift(Experiment):
    """The shift of definition 2.1, in nets with Batch Normalization and without."""

    name = "covariate-shift"
    claim = "Nets with Batch Normalization have a smaller internal covariate shift than nets without."
    source = "Ioffe & Szegedy 2015, section 2; measured as in Santurkar et al. 2018, definition 2.1"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Two kinds of net at two rates each, with and without BN; at the quick scale one rate."""
        count = 1 if scale == "quick" else 2
        return [
            Arm(f"{net}-{norm}-{rate:g}", NETS[scale][net] | {"net": net, "norm": norm, "rate": rate})
            for net in (VGG, LINEAR)
            for rate in RATES[net][:count]
            for norm in (PLAIN, BN)
        ]

    def training(self, trial: Trial) -> Training:
        """Plain SGD, as in the paper, and the probe at every measured step."""
        found = _vgg_training(trial) if trial.arm.settings["net"] == VGG else _linear_training(trial)
        found.probes = lambda closure: probes(found.model, closure)
        return found

    def findings(self, run: Run) -> Findings:
        """Compare the shifts, pair of nets by pair of nets."""
        compared = [Compared(run, net, rate) for net, rate in _pairs(self.arms(run.header["scale"]))]
        holds = [agreed(pair.is_smaller()) for pair in compared]
        return Findings(
            self.claim,
            self.source,
            verdict(holds, is_complete(run, self.arms(run.header["scale"]))),
            [pair.reason() for pair in compared],
            [_table(compared)],
            _figures(run, compared),
            NOTES,
        )


EXPERIMENT = InternalCovariateShift()


def probes(model: nn.Module, closure: Closure) -> Sequence[Probe]:
    """The probe, on all layers with matrices of weights but the first, whose gradient cannot shift."""
    layers = [name for name, layer in model.named_modules() if has_weight(layer)]
    return [nk.probes.CovariateShift(closure, layers[1:])]


def _vgg_training(trial: Trial) -> Training:
    settings, images = trial.arm.settings, Classification(data.load(trial.data))
    norm = nk.BatchNorm2d if settings["norm"] == BN else None
    return images.plain_training(trial, images.vgg(norm, settings), lambda step: step % settings["every"] == 0)


def _linear_training(trial: Trial) -> Training:
    settings = trial.arm.settings
    norm = nk.BatchNorm1d if settings["norm"] == BN else None
    model = deep_linear(norm, layers=settings["layers"], width=settings["width"], init=None)
    models.initialize_(model, "glorot", seed=trial.seed)
    return Training(
        model,
        torch.optim.SGD(model.parameters(), lr=settings["rate"]),
        lambda start: linear_batches(settings["samples"], settings["width"], trial.seed),
        settings["steps"],
        lambda step: step % settings["every"] == 0,
        lambda model: {},  # the training loss says it all: there is one batch, and no other data
        loss=lambda output, target: (output - target).square().sum(),
    )


def linear_batches(samples: int, width: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batch without end: x and Ax."""
    random = generator("deep-linear", seed, 0)
    matrix, x = torch.randn(width, width, generator=random), torch.randn(samples, width, generator=random)
    return itertools.repeat((x, x @ matrix.T))


# ---- what the records say


def _pairs(arms: Sequence[Arm]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((arm.settings["net"], arm.settings["rate"]) for arm in arms))


class Compared:
    """A kind of net at a rate, with BN and without."""

    def __init__(self, run: Run, net: str, rate: float) -> None:
        self.net, self.title = net, f"{net} at {rate:g}"
        self.arms = {norm: f"{net}-{norm}-{rate:g}" for norm in (PLAIN, BN)}
        self.trials = {norm: [trial for trial in run.of(arm) if trial.end] for norm, arm in self.arms.items()}
        self._paired = paired(run, self.arms[BN], self.arms[PLAIN])

    def ratios(self) -> list[float | None]:
        """BN's relative shift over the plain net's, seed by seed."""
        return ratios(self._paired, lambda trial: probe_median(trial, PROBE, "relative"))

    def is_smaller(self) -> list[bool | None]:
        """Whether BN's shift is the smaller one, seed by seed; None where a net diverged."""
        return [None if ratio is None else ratio < SMALLER for ratio in self.ratios()]

    def ends(self, norm: str) -> str:
        """Where training ends: the accuracy, or the loss of the deep linear net."""
        key, digits = ("accuracy", 3) if self.net == VGG else ("loss", 0)
        return with_range([last(trial, key) for trial in self.trials[norm]], digits)

    def medians(self, norm: str, key: str) -> str:
        """Over seeds, of what the probe recorded."""
        return with_range(known([probe_median(trial, PROBE, key) for trial in self.trials[norm]]), 3)

    def reason(self) -> str:
        """What is found, in a sentence."""
        said = self.is_smaller()
        beside = ", ".join(f"{self.medians(norm, 'relative')} {name}" for norm, name in _NAMES.items())
        cosines = ", ".join(f"{self.medians(norm, 'cosine')} {name}" for norm, name in _NAMES.items())
        ends = ", ".join(f"{self.ends(norm)} {name}" for norm, name in _NAMES.items())
        return (
            f"{self.title}: relative shift {beside}, a factor of {with_range(known(self.ratios()), 2)}; smaller in "
            f"{said.count(True)} of {len(said)} seeds. Cosine {cosines}. "
            f"{'Test accuracy' if self.net == VGG else 'Loss'} at the end {ends}."
        )


_NAMES = {BN: "with BN", PLAIN: "without"}


def _table(compared: Sequence[Compared]) -> Table:
    rows = [
        [pair.title, norm, *(pair.medians(norm, key) for key in KEYS), pair.ends(norm)]
        for pair in compared
        for norm in (PLAIN, BN)
    ]
    columns = ["net", "norm", "|G - G'| / |G|", "cosine", "|G - G'|", "accuracy or loss"]
    note = (
        "Median (range) over seeds; of each seed, the median over layers and measured steps. The last column is at the "
        "end: test accuracy of VGG nets, training loss of deep linear ones."
    )
    return Table("Internal covariate shift", columns, rows, note)


def _figures(run: Run, compared: Sequence[Compared]) -> list[Figure]:
    def figure(net: str, key: str, title: str) -> Figure:
        arms = [arm for pair in compared if pair.net == net for arm in pair.arms.values()]
        curves = [curve_over_seeds(arm, [_with_shifts(trial) for trial in run.of(arm)], key) for arm in arms]
        return Figure(
            f"{title}, {net}", "steps", title.lower(), curves, "Median and range over seeds; of layers, the median."
        )

    titles = {"relative": "Relative shift", "cosine": "Cosine of G and G'"}
    ends = {VGG: ("accuracy", "Test accuracy"), LINEAR: ("loss", "Training loss")}
    return [figure(net, *of) for net in (VGG, LINEAR) for of in (*titles.items(), ends[net])]


def _with_shifts(trial: TrialRecord) -> TrialRecord:
    return with_medians(trial, PROBE, {key: key for key in KEYS})
