"""Where ReLUs draw their boundaries through the data at the start, and how wide batch noise makes margins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Curve, Figure, Table
from normkit.lab import data, models, partition
from normkit.lab.classification import Classification
from normkit.lab.data.randomness import generator
from normkit.lab.data.transforms import standardized
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.relu_nets import relu_net
from normkit.lab.models.toy_problem import NO_EPS
from normkit.lab.probed import agreed, has_diverged, paired, with_medians
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range

NETS, STARTS = ("mlp", "conv"), ("bn", "zero", "random")
CHUNKS = (4, 16, 64)  # examples whose statistics are taken together; without chunks, all of a batch
JUDGED, WHOLE = "margin-chunk-16", "margin-whole"
MARGINS = (*(f"margin-chunk-{chunk}" for chunk in CHUNKS), WHOLE)
STEPS = {"quick": 30, "desk": 4000, "full": 20_000}
EVERY = {"quick": 15, "desk": 400, "full": 1000}
WIDTHS = {
    "mlp": {"quick": (16, 16), "desk": (100,) * 3, "full": (500,) * 5},
    "conv": {"quick": (4, 8), "desk": (8, 16, 32), "full": (32, 64, 128, 128)},
}
IMAGES = {"quick": 64, "desk": 512, "full": 1000}
BATCHES = {"quick": (4, 16), "desk": (4, 16, 64, 256), "full": (4, 16, 64, 256)}
DRAWS = {"quick": 4, "desk": 40, "full": 100}
RADIUS = 0.5  # of a standard deviation of the data along a random direction
IDENTITY = 1e-10  # the largest relative error
SLOPE, TOLERANCE = -0.5, 0.1  # of the jitter by batch size on logarithmic axes, and how far it may be off
NOTES = (
    "At the start, BN is compared with biases of zero and with random ones, from the same weights. Each of (a) to (d) "
    "holds with a seed if it holds for both nets, and fails if it fails for both. (a): BN's mean squared distance "
    "from layers' inputs to units' boundaries, over the inputs' variance along a random direction, is the lowest in "
    f"the mean over layers, and with BN variance = |w|^2 mean(d^2) is off by no more than {IDENTITY:g}. (b): near data "
    "there are more boundaries than near points drawn uniformly from the data's range, by the highest factor with BN; "
    f"near is within {RADIUS:g} of the data's standard deviation along a random direction. (c): units switch most "
    "often with BN along segments between two images, in the mean over layers. (d): over mini-batches, boundaries "
    f"move by a power of the batch size that is within {TOLERANCE:g} of {SLOPE:g}, in each layer.",
    "(e): the median margin of test images is wider where statistics are those of chunks of 16 than where they are "
    "those of the whole batch of 256, after as many steps at the same rate. A margin is the difference of the two "
    "greatest outputs over the norm of its gradient by the image.",
    "Of the parts, each holds if it does with every seed, and fails if it fails with every seed. The claim is "
    "supported if all hold and contradicted if one fails.",
    "At the start statistics are those of the images measured, as variances divided by N; all is in double precision, "
    "with an eps that no variance notices. In the first layer (a) is a theorem: of all hyperplanes with a unit's "
    "direction, that through the mean has the least mean squared distance. Random biases have standard deviation 1, "
    "where what a unit computes has about 1.4.",
    "Distances in (b) are of first order, |h| / |dh/dx|, for 16 units of each layer drawn at random. Uniform points "
    "lie outside of what images look like, but not far away: each pixel is within its range.",
    "In (e) nets with more noise also fit less: part of a wider margin may be a training that is less far. The "
    "accuracies are beside it.",
    "Rules were written after short looks with one seed: of (b) with three radii and of (c), on somewhat smaller nets "
    "and other units; and of (e) at 600 steps, of which the rate and the judged size of chunks come: at 4 examples "
    "accuracy suffered, at 16 it did not. Three of the starts were then timed with one seed. The rules were left as "
    "they were, although of the MLP's layers one came out just outside the limits of (d) and one just inside.",
)


class Geometry(Experiment):
    """Nets at their start, with norms and with biases; then margins, with more and less noise."""

    name = "geometry"
    claim = (
        "Batch Normalization draws the boundaries of a net's linear regions to the data before anything is learnt: "
        "(a) they are closer, (b) more of them lie near data than elsewhere, (c) segments between data cross more. "
        "(d) Batches make them jitter, and (e) the noise widens margins."
    )
    source = "Balestriero & Baraniuk 2022"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Three starts of two nets, and four trainings whose statistics are of more and more examples."""
        start = {"images": IMAGES[scale], "batches": list(BATCHES[scale]), "draws": DRAWS[scale], "steps": 0}
        starts = [
            Arm(f"{net}-{kind}", start | {"net": net, "start": kind, "hidden": list(WIDTHS[net][scale])})
            for net in NETS
            for kind in STARTS
        ]
        usual = {"net": "mlp", "hidden": list(WIDTHS["mlp"][scale]), "rate": 0.1, "batch": 256, "steps": STEPS[scale]}
        margins = [Arm(f"margin-chunk-{chunk}", usual | {"chunk": chunk}) for chunk in CHUNKS]
        return [*starts, *margins, Arm(WHOLE, usual | {"chunk": None})]

    def training(self, trial: Trial) -> Training:
        """No step at all, or SGD on standardized images watched by `BoundaryDistances`."""
        return _at_start(trial) if "start" in trial.arm.settings else _with_margins(trial)

    def findings(self, run: Run) -> Findings:
        """Judge the five parts."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end and trial.measured])
        parts = [agreed([held for _, held in _by_seed(ended, part)]) for part in (is_closer, is_denser, is_crossed)]
        parts += [agreed([held for _, held in _by_seed(ended, is_steady)]), agreed(_is_wider(ended))]
        complete = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict(parts, complete, contradicted_by="any"),
            _reasons(ended),
            [_start_table(ended), _margin_table(ended)],
            [_jitter_figure(ended), _margin_figure(ended)],
            NOTES,
        )


EXPERIMENT = Geometry()


def _at_start(trial: Trial) -> Training:
    settings, found = trial.arm.settings, data.load(trial.data)
    norm = partial(nk.BatchNorm2d if settings["net"] == "conv" else nk.BatchNorm1d, eps=NO_EPS)
    model = relu_net(settings, norm if settings["start"] == "bn" else None, found)
    models.initialize_(model, seed=trial.seed)
    if settings["start"] == "random":
        drawing = generator("biases", trial.seed, 0)  # of their own, so that all starts see the same images
        for unit in partition.units_of(model):
            nn.init.normal_(unit.layer.bias, generator=drawing)
    order = torch.randperm(len(found.train.labels))
    images = standardized(found.train.pixels)(found.train.pixels[order[:5000]]).double().contiguous()
    return Training(
        model.double(),
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda start: iter(()),
        settings["steps"],
        lambda step: True,
        lambda model: _of_start(deepcopy(model), images, settings),
    )


def _of_start(model: nn.Module, images: Tensor, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is measured before anything is learnt; the batches of (d) are drawn from all images."""
    found: dict[str, Any] = partition.measured(model, images[: settings["images"]], RADIUS)
    if settings["start"] == "bn":
        found["jitter"] = [partition.jitter(model, _drawn(images, size, settings)) for size in settings["batches"]]
    return found


def _drawn(images: Tensor, size: int, settings: Mapping[str, Any]) -> list[Tensor]:
    return [images[torch.randperm(len(images))[:size]] for _ in range(settings["draws"])]


def _with_margins(trial: Trial) -> Training:
    settings, found = trial.arm.settings, data.load(trial.data)
    norm = nk.BatchNorm1d if settings["chunk"] is None else partial(nk.GhostBatchNorm1d, chunk_size=settings["chunk"])
    model = relu_net(settings, norm, found)
    models.initialize_(model, seed=trial.seed)  # the same for all
    optimizer, every = torch.optim.SGD(model.parameters(), lr=settings["rate"]), EVERY[trial.scale]
    training = Classification(found).training(trial, model, optimizer, lambda step: step > 0 and step % every == 0)
    images = standardized(found.train.pixels)(found.test.pixels[:1000])
    training.probes = lambda loss: [nk.probes.BoundaryDistances(images)]
    return training


# ---- what the records say

Judge = Callable[[Mapping[str, Any]], bool]  # of what one net measured at its starts, by start


def number(line: Mapping[str, Any], what: str) -> float:
    """A measure of a start, in the mean over layers; "ratio" is of boundaries near data to those near other points."""
    if what == "ratio":
        return line["near"] / line["elsewhere"] if line["elsewhere"] else math.inf
    return fmean(line[what]) if isinstance(line[what], list) else float(line[what])


def is_closer(starts: Mapping[str, Any]) -> bool:
    """(a) Boundaries are closest with BN, and at the distance that the variance says."""
    own, *others = (number(starts[kind], "distances") for kind in STARTS)
    return own < min(others) and starts["bn"]["identity"] <= IDENTITY


def is_denser(starts: Mapping[str, Any]) -> bool:
    """(b) Boundaries keep to the data, and the most with BN."""
    own, *others = (number(starts[kind], "ratio") for kind in STARTS)
    return own > max(1.0, *others)


def is_crossed(starts: Mapping[str, Any]) -> bool:
    """(c) Segments between data cross the most boundaries with BN."""
    own, *others = (number(starts[kind], "crossings") for kind in STARTS)
    return own > max(others)


def is_steady(starts: Mapping[str, Any]) -> bool:
    """(d) Jitter falls as one over the root of the batch, in each layer."""
    return all(abs(slope - SLOPE) <= TOLERANCE for slope in jitter_slopes(starts["bn"]))


def jitter_slopes(line: Mapping[str, Any]) -> list[float]:
    """The power of the batch size that the jitter of each layer goes by."""
    sizes = [math.log(size) for size in line["batches"]]
    return [linear_regression(sizes, [math.log(j) for j in layer]).slope for layer in zip(*line["jitter"], strict=True)]


def _starts(run: Run, net: str, seed: int) -> dict[str, Any] | None:
    """What one net measured, by start, with the sizes of batches; None if a start is missing."""
    trials = {kind: [t for t in run.of(f"{net}-{kind}") if t.seed == seed] for kind in STARTS}
    found = {kind: {**of[0].measured[-1], **of[0].header["settings"]} for kind, of in trials.items() if of}
    return found if len(found) == len(STARTS) else None


def _by_seed(run: Run, judge: Judge) -> list[tuple[list[bool], bool | None]]:
    """For each seed whether each net passes, and what they say together."""
    found = []
    for seed in sorted({trial.seed for trial in run.trials}):
        each = [judge(starts) for net in NETS if (starts := _starts(run, net, seed)) is not None]
        if len(each) == len(NETS):
            found.append((each, agreed(each)))
    return found


def of_margins(trial: TrialRecord) -> TrialRecord:
    """The trial with the median margin of test images in its lines, where probes recorded it for the model itself."""
    return with_medians(
        trial, "BoundaryDistances", {"margin": lambda record: None if record["layer"] else record["median"]}
    )


def _is_wider(run: Run) -> list[bool | None]:
    """(e) Whether margins are wider with more noise, seed by seed; a divergence says nothing."""
    pairs = paired(run, JUDGED, WHOLE)
    return [None if any(map(has_diverged, pair)) else _margin(pair[0]) > _margin(pair[1]) for pair in pairs]


def _margin(trial: TrialRecord) -> float:
    return last(of_margins(trial), "margin")


def _reasons(run: Run) -> list[str]:
    errors = [trial.measured[-1]["identity"] for net in NETS for trial in run.of(f"{net}-bn")]
    slopes = "; ".join(f"{net} {with_range(_slopes(run, net), 3)}" for net in NETS)
    margins = ", ".join(f"{arm} {with_range([*map(_margin, run.of(arm))], 3)}" for arm in (JUDGED, WHOLE))
    wider = _is_wider(run)
    return [
        f"(a) Mean squared distance to boundaries, over the variance along a random direction: "
        f"{_listed(run, 'distances')}. {_tally(run, is_closer)} With BN variance = |w|^2 mean(d^2) is off by "
        f"{max(errors, default=math.nan):.1g} at most.",
        f"(b) Boundaries near data over those near other points: {_listed(run, 'ratio')}. {_tally(run, is_denser)}",
        f"(c) How often a unit switches between two images: {_listed(run, 'crossings')}. {_tally(run, is_crossed)}",
        f"(d) Jitter goes by the batch size to the power of, over layers and seeds, {slopes}. {_tally(run, is_steady)}",
        f"(e) Median margins: {margins}; wider with chunks in {wider.count(True)} of {len(wider)} seeds.",
    ]


def _slopes(run: Run, net: str) -> list[float]:
    lines = [{**trial.measured[-1], **trial.header["settings"]} for trial in run.of(f"{net}-bn")]
    return [slope for line in lines for slope in jitter_slopes(line)]


def _listed(run: Run, what: str) -> str:
    def values(arm: str) -> str:
        return with_range([number(trial.measured[-1], what) for trial in run.of(arm)], 2)

    return "; ".join(f"{net} " + ", ".join(f"{kind} {values(f'{net}-{kind}')}" for kind in STARTS) for net in NETS)


def _tally(run: Run, judge: Judge) -> str:
    found = [each for each, _ in _by_seed(run, judge)]
    nets = " and ".join(f"for {net} with {sum(each[i] for each in found)}" for i, net in enumerate(NETS))
    return f"It holds {nets} of {len(found)} seeds."


# ---- tables and figures


def _start_table(run: Run) -> Table:
    columns = {"distances": "squared distance", "near": "near data", "elsewhere": "near uniform points"}
    columns |= {"ratio": "ratio", "crossings": "switches per segment"}
    rows = []
    for arm in (f"{net}-{kind}" for net in NETS for kind in STARTS):
        lines = [trial.measured[-1] for trial in run.of(arm)]
        rows.append([arm, *(with_range([number(line, what) for line in lines], 3) for what in columns)])
    note = "Median (range) over seeds; distances and switches in the mean over layers, shares over units and points."
    return Table("Boundaries before training", ["start", *columns.values()], rows, note)


def _margin_table(run: Run) -> Table:
    rows = []
    for arm in MARGINS:
        trials = [of_margins(trial) for trial in run.of(arm)]
        keys = {"margin": 3, "accuracy": 4, "loss": 4}
        rows.append([arm, *(with_range([last(trial, key) for trial in trials], n) for key, n in keys.items())])
    note = "At the end, on test images but for the loss: median (range) over seeds."
    return Table("Margins", ["statistics of", "median margin", "accuracy", "training loss"], rows, note)


def _jitter_figure(run: Run) -> Figure:
    curves = []
    for net in NETS:
        trials = run.of(f"{net}-bn")
        sizes = trials[0].header["settings"]["batches"] if trials else []
        values = [[fmean(trial.measured[-1]["jitter"][i]) for trial in trials] for i in range(len(sizes))]
        curves.append(Curve(net, sizes, [fmean(of) for of in values]))
    note = "In the mean over layers and seeds."
    return Figure("Jitter of boundaries by batch size", "batch", "jitter", curves, note, log_x=True, log_y=True)


def _margin_figure(run: Run) -> Figure:
    arms = MARGINS
    curves = [curve_over_seeds(arm, [of_margins(trial) for trial in run.of(arm)], "margin") for arm in arms]
    return Figure("Margins of test images", "steps", "median margin", curves, "Median and range over seeds.")
