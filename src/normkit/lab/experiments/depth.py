"""How many times fewer steps a net takes with Batch Normalization, against its depth and its first weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Cell, Curve, Figure, Table
from normkit.lab import data, models, speedups
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.resnet import BlockName
from normkit.lab.probed import agreed, known, paired
from normkit.lab.race import Race, RaceStep
from normkit.lab.record import Run, TrialRecord
from normkit.lab.speedups import TRAINS, exceeds, most, numbers, times_fewer, trains
from normkit.lab.summaries import (
    best,
    curve_of_medians,
    curve_over_seeds,
    is_complete,
    late_gain,
    steps_to,
    verdict,
    with_range,
)

INCEPTION, PLAIN, RESIDUAL = "inception", "plain", "residual"
UNITS = {INCEPTION: "modules", PLAIN: "layers", RESIDUAL: "layers"}
BLOCKS: dict[str, BlockName] = {PLAIN: "plain", RESIDUAL: "v1"}
HE, GAUSSIAN = "he", "gaussian"
WEIGHTS = (HE, GAUSSIAN)
SIGMA = 0.3  # of Gaussian weights, over the root of a net's width
NONE, BN = "none", "bn"
DEPTHS: dict[Scale, dict[str, tuple[int, ...]]] = {
    "quick": {INCEPTION: (2, 3), PLAIN: (8, 14), RESIDUAL: (8, 14)},
    "desk": {INCEPTION: (6, 10, 18, 34), PLAIN: (8, 20, 56), RESIDUAL: (8, 20, 56)},
    "full": {INCEPTION: (6, 10, 18, 34), PLAIN: (8, 20, 32, 44, 56, 110), RESIDUAL: (8, 20, 32, 44, 56, 110)},
}
SIZES: dict[Scale, dict[str, int]] = {
    "quick": {"width": 2, "batch": 8, "steps": 16},
    "desk": {"width": 4, "batch": 32, "steps": 192},
    "full": {"width": 16, "batch": 32, "steps": 20_000},
}
IMAGES = {"quick": 50, "desk": 500, "full": 2000}  # to test on
POPULATION = 128  # images
RATES, MOMENTUM = (0.003, 0.01, 0.03, 0.1, 0.3), 0.9
FIRST, SPACING = 1 / 32, 1.25  # of all steps, before the first test; from one test to the next
SLACK = 0.01  # of accuracy below the level, which a single lucky test may set
PAPER = 14.0  # times fewer steps
NOTES = (
    "The factor of a net and a seed is the number of steps to the best accuracy without BN, over that of the steps "
    "with BN to the same accuracy, from the same weights. A net trains if three accuracies measured in a row have a "
    f"median of at least {100 * TRAINS:g}%. If it does so with BN only, the factor is infinite, and is given in words; "
    "if it does so without BN and never comes to that accuracy with BN, the factor is 0 (never); if it trains with "
    "neither, there is none.",
    "(a) holds in a seed if the deepest net's factor exceeds the shallowest's in more than half of the rows, which are "
    "the nets of one build from one kind of weights; it fails if in less than half. (b) holds if the factor from "
    "Gaussian weights exceeds that from He's for more than half of the nets, and fails if for less than half. Where "
    "both factors are infinite, or one is missing, nothing is compared. (c) holds if an Inception has a factor of "
    f"{PAPER:g} or more, else it fails. Supported: all parts hold in every seed. Contradicted: one fails in each.",
    "A trial is a race of one net at five rates, on the same batches. After a sixteenth of the steps the three with "
    "the lowest training loss go on; after a quarter the best of them, and a twin of it whose rate decays to 1% by the "
    "end; after half of the steps the better of these two. As long as none has learnt anything (smoothed losses within "
    "0.02 of guessing), the three are those with the highest rates, and all of them go on after a quarter of the "
    "steps; after half of them they give up. The accuracy at a step is the highest of the nets in the race, with and "
    "without BN alike.",
    "The nets are tested first after a thirty-second of the steps, then whenever these have grown by a quarter: a "
    "factor is known to about a quarter, and cannot be above 32. BN is tested with the statistics of "
    f"{POPULATION} training images (Algorithm 2): moving averages lag behind in the first steps. At the desk scale 500 "
    "test images are looked at; 1.8 points may be their luck.",
    "A ratio is only fair if the net without BN is trained until it gets no better: what it still gained in the last "
    "quarter of its steps is said above. But a rate that decays ends all gains: such a plateau is that of a schedule. "
    "At the desk scale all nets have 192 steps of 32 images, so that two slow cores have time for 120 races in 25 "
    "minutes. With more steps accuracies would be higher, and nets might train that do not here.",
    "At the desk scale Inception has a sixteenth of the paper's width, half of that in `inception`; plain and residual "
    "nets have a quarter of He's. No Dropout, no L2, no local response normalization; momentum 0.9; biases are zero at "
    "first. Gaussian weights have one standard deviation for all layers, 0.15 at the desk scale, with which a layer "
    "passes on as much as with 0.0375 in a net of the paper's width. It was chosen by the length of the first layer's "
    "gradient before any training, so that depth makes a difference: without BN it is 2e-3 with 6 modules and 7e-13 "
    "with 34, 2e-2 with 8 plain layers and 1e-7 with 56. With 0.03 it is 1e-8 with 6 modules already, too small for "
    "any of these depths; with He's weights it is above 1e-4 in the deepest of these nets.",
    "The rule was written before any of these nets had been trained, but for the 16 steps of the quick scale. With 256 "
    "steps at the desk scale, with which five races of the first seed had ended, two slow cores would have taken over "
    "half an hour: there are a quarter fewer since.",
)


class Net(NamedTuple):
    """What is trained with BN and without."""

    family: str
    depth: int
    weights: str

    def arm(self, norm: str) -> str:
        """The name of its arm with this norm."""
        return f"{self.family}-{self.depth}-{self.weights}-{norm}"


def nets(scale: Scale) -> list[Net]:
    """The nets of a scale."""
    return [
        Net(family, depth, kind) for family, depths in DEPTHS[scale].items() for kind in WEIGHTS for depth in depths
    ]


class Depth(Experiment):
    """Nets of three builds and several depths, from two kinds of weights, each with BN and without."""

    name = "depth"
    claim = (
        "(a) How many times fewer steps a net takes with Batch Normalization grows with its depth; (b) it is larger "
        "from Gaussian weights of one width for all layers than from He's; (c) among deep Inceptions it comes to the "
        "paper's 14."
    )
    source = "Ioffe & Szegedy 2015, section 4.2, figure 3; He et al. 2015"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every net without BN and with it."""
        shared = SIZES[scale] | {"rates": list(RATES), "momentum": MOMENTUM}
        scales = {HE: 1.0, GAUSSIAN: SIGMA / math.sqrt(SIZES[scale]["width"])}
        return [
            Arm(of.arm(norm), shared | of._asdict() | {"scale": scales[of.weights], "norm": norm})
            for of in nets(scale)
            for norm in (NONE, BN)
        ]

    def training(self, trial: Trial) -> Training:
        """SGD with momentum, at five rates side by side."""
        settings, found = trial.arm.settings, data.load(trial.data)
        images = Classification(found, IMAGES[trial.scale])
        race = Race(net(settings, images, trial.seed), settings["rates"])
        optimizer = race.optimizer(settings["momentum"])
        training = images.training(trial, race, optimizer, frozenset(measured_at(settings["steps"])).__contains__)
        population, _ = next(images.batches(min(POPULATION, len(found.train.labels)), trial.seed, 0))
        training.measure = lambda _: measured(race, images, population)
        training.update = RaceStep(race, optimizer, settings["steps"], images.classes)
        return training

    def findings(self, run: Run) -> Findings:
        """Compare the factors from net to net."""
        scale: Scale = run.header["scale"]
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        found = {of: factors(ended, of) for of in nets(scale)}
        deeper, gaussian = compared(found, deep_and_shallow(scale)), compared(found, gaussian_and_he(scale))
        parts = [
            agreed([*map(most, deeper.values())]),
            agreed([*map(most, gaussian.values())]),
            agreed([comes_to_the_papers(found, seed) for seed in deeper]),
        ]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(scale)), contradicted_by="any"),
            [
                _depth_reason(found, deeper, deep_and_shallow(scale)),
                _weights_reason(gaussian),
                _paper_reason(found),
                _plateau_reason(ended, found),
            ],
            [_table(ended, found)],
            _figures(ended, found, DEPTHS[scale]),
            NOTES,
        )


EXPERIMENT = Depth()


# ---- nets, and what is measured of them


def net(settings: Mapping[str, Any], images: Classification, seed: int) -> nn.Module:
    """Return the net of an arm; with the same seed, its weights are the same with BN and without."""
    # With a momentum of 1 what is stored are the statistics of the last batch: when nets are tested, of a large one.
    norm = partial(nk.BatchNorm2d, momentum=1.0) if settings["norm"] == BN else None
    sizes = {"in_channels": images.channels, "classes": images.classes, "width": settings["width"], "stem_stride": 2}
    depth, family = settings["depth"], settings["family"]
    model: nn.Module
    if family == INCEPTION:
        model = models.small_inception(norm, modules=depth, init=None, **sizes)
    else:
        model = models.resnet(depth, norm, block=BLOCKS[family], init=None, **sizes)
    models.initialize_(model, settings["weights"], settings["scale"], seed=seed)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def measured_at(steps: int) -> list[int]:
    """The numbers of steps after which nets are tested: early ones are nearer to each other than late ones."""
    count = math.ceil(-math.log(FIRST, SPACING))
    return sorted({max(1, round(steps * FIRST ** (i / count))) for i in range(count + 1)})


def measured(race: Race, images: Classification, population: Tensor) -> dict[str, Any]:
    """The accuracies of the nets that run, and the highest of them."""
    accuracies = {}
    for name, one in race.running_nets().items():
        one.train()(population)
        accuracies[name] = images.accuracy(one.eval())
    return {"accuracy": max(accuracies.values(), default=0.0), "accuracies": accuracies}


# ---- what the records say

Factors = Mapping[Net, Mapping[int, float | None]]  # by seed
Pairs = Sequence[tuple[Net, Net]]
Answers = Mapping[int, Sequence[bool | None]]  # by seed, one for each pair


def factors(run: Run, of: Net, below: float = 0.0) -> dict[int, float | None]:
    """How many times fewer steps a net takes with BN to its best accuracy without, less `below`, by seed."""
    return {bn.seed: times_fewer(bn, none, below) for bn, none in paired(run, of.arm(BN), of.arm(NONE))}


def deep_and_shallow(scale: Scale) -> Pairs:
    """The deepest and the shallowest net of each build and kind of weights."""
    rows = [(family, kind, depths) for family, depths in DEPTHS[scale].items() for kind in WEIGHTS]
    return [(Net(family, depths[-1], kind), Net(family, depths[0], kind)) for family, kind, depths in rows]


def gaussian_and_he(scale: Scale) -> Pairs:
    """Every net from either kind of weights."""
    return [(of, of._replace(weights=HE)) for of in nets(scale) if of.weights == GAUSSIAN]


def compared(found: Factors, pairs: Pairs) -> Answers:
    """Whether the factor of the first net of each pair exceeds that of the second."""
    seeds = sorted({seed for by_seed in found.values() for seed in by_seed})
    return {seed: [exceeds(found[one].get(seed), found[other].get(seed)) for one, other in pairs] for seed in seeds}


def comes_to_the_papers(found: Factors, seed: int) -> bool | None:
    """(c) An Inception has the paper's factor or more; None if none has any."""
    seen = known([by_seed.get(seed) for of, by_seed in found.items() if of.family == INCEPTION])
    return any(factor >= PAPER for factor in seen) if seen else None


_shown = partial(speedups.shown, of="BN")


def _counted(answers: Answers) -> str:
    said = [answer for of_seed in answers.values() for answer in of_seed if answer is not None]
    return f"{sum(said)} of {len(said)}"


def _depth_reason(found: Factors, deeper: Answers, pairs: Pairs) -> str:
    ends = [
        f"from {deep.weights} weights {_shown(found[shallow].values())} with {shallow.depth} modules, and "
        f"{_shown(found[deep].values())} with {deep.depth}"
        for deep, shallow in pairs
        if deep.family == INCEPTION
    ]
    return (
        f"(a) In {_counted(deeper)} rows and seeds that can be compared, the deepest net's factor exceeds the "
        f"shallowest's. Inception's: {'; '.join(ends)}."
    )


def _weights_reason(gaussian: Answers) -> str:
    return (
        f"(b) In {_counted(gaussian)} nets and seeds that can be compared, the factor is larger from Gaussian weights."
    )


def _paper_reason(found: Factors) -> str:
    """Where the paper's factor stands, and the largest one that is a number."""
    inceptions = {of: [*by_seed.values()] for of, by_seed in found.items() if of.family == INCEPTION and by_seed}

    def named(of: Net) -> str:
        return f"{of.depth} modules from {of.weights} weights ({_shown(inceptions[of])})"

    there = [
        of for of, factors in inceptions.items() if all(factor is not None and factor >= PAPER for factor in factors)
    ]
    countable = [of for of, factors in inceptions.items() if len(numbers(factors)) == len(factors)]
    largest = max(countable, key=lambda of: median(numbers(inceptions[of])), default=None)
    return (
        f"(c) A factor of {PAPER:g} or more in every seed: {', '.join(map(named, there)) or 'none'}. The largest "
        f"that is a number in every seed: {named(largest) if largest else 'none'}."
    )


def _plateau_reason(run: Run, found: Factors) -> str:
    trials = [trial for of in found for trial in run.of(of.arm(NONE))]
    gains = [100 * late_gain(trial) for trial in trials if trains(trial)]
    return (
        f"Without BN {len(gains)} of {len(trials)} nets and seeds train; in the last quarter of their steps they still "
        f"rose by {with_range(gains, 1)} points."
    )


def _table(run: Run, found: Factors) -> Table:
    rows: list[list[Cell]] = []
    for of, by_seed in found.items():
        pairs = paired(run, of.arm(BN), of.arm(NONE))
        ends = [_percent(best(pair[i]) for pair in pairs) for i in (1, 0)]
        steps = [with_range([steps_to(pair[i], best(pair[1])) for pair in pairs]) for i in (1, 0)]
        rates = [", ".join(dict.fromkeys(leader(pair[i]) for pair in pairs)) for i in (1, 0)]
        times = [_shown(by_seed.values()), _shown(factors(run, of, SLACK).values())]
        gain = with_range([100 * late_gain(none) for _, none in pairs], 1)
        rows.append([of.family, of.depth, of.weights, *ends, *steps, *times, gain, *rates])
    columns = ["build", "depth", "weights", "best, %", "BN: best, %", "steps", "BN: steps", "times fewer"]
    columns += [f"times fewer, to {100 * SLACK:.0f} point less", "late gain, points", "rate", "BN: rate"]
    note = (
        "Median (range) over seeds. Steps: to the best accuracy without BN. Late gain: by how much that accuracy rose "
        "in the last quarter of the steps. Rates: of the nets that led at the end."
    )
    return Table("Steps to the best accuracy without BN", columns, rows, note)


def leader(trial: TrialRecord) -> str:
    """The rate of the net with the highest accuracy when it was last measured."""
    accuracies = trial.measured[-1]["accuracies"] if trial.measured else {}
    return max(accuracies, key=lambda name: float(accuracies[name]), default="-")


def _percent(values: Iterable[float]) -> str:
    return with_range([100 * value for value in values], 1)


def _figures(run: Run, found: Factors, depths: Mapping[str, Sequence[int]]) -> list[Figure]:
    inceptions = depths[INCEPTION]
    return [
        *(_factor_figure(found, family, of) for family, of in depths.items()),
        *(_accuracy_figure(run, family, of) for family, of in depths.items()),
        *(_race_figure(run, Net(INCEPTION, depth, HE)) for depth in (inceptions[0], inceptions[-1])),
    ]


def _factor_figure(found: Factors, family: str, depths: Sequence[int]) -> Figure:
    most = 1 / FIRST
    note = (
        f"Median and range over seeds. At {most:.0f}, the largest factor that can be measured: only BN trains. Left "
        "out: nets that train with neither, and such as never come to the accuracy without BN; the table has them."
    )

    def drawn(of: Net) -> list[float]:
        return [min(factor, most) for factor in found[of].values() if factor]

    curves = [curve_of_medians(kind, [(n, drawn(Net(family, n, kind))) for n in depths]) for kind in WEIGHTS]
    if family == INCEPTION:
        curves.append(Curve("paper", [depths[0], depths[-1]], [PAPER, PAPER], is_published=True))
    title = f"Times fewer steps with BN by depth: {family}"
    return Figure(title, UNITS[family], "times fewer", curves, note, log_x=True, log_y=True)


def _accuracy_figure(run: Run, family: str, depths: Sequence[int]) -> Figure:
    def ends(depth: int, kind: str, norm: str) -> list[float]:
        return [best(trial) for trial in run.of(Net(family, depth, kind).arm(norm)) if trial.measured]

    curves = [
        curve_of_medians(f"{kind}, {norm}", [(depth, ends(depth, kind, norm)) for depth in depths])
        for kind in WEIGHTS
        for norm in (NONE, BN)
    ]
    note = "Median and range over seeds."
    return Figure(f"Best test accuracy by depth: {family}", UNITS[family], "accuracy", curves, note, log_x=True)


def _race_figure(run: Run, of: Net) -> Figure:
    arms = {f"{kind}, {norm}": of._replace(weights=kind).arm(norm) for kind in WEIGHTS for norm in (NONE, BN)}
    curves = [curve_over_seeds(name, run.of(arm)) for name, arm in arms.items()]
    note = "Of the best net in the race: median and range over seeds."
    return Figure(f"Test accuracy of {of.depth} modules", "steps", "accuracy", curves, note, log_x=True)
