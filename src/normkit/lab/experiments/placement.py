"""Where a norm stands: before the nonlinearity or after it, per channel or per position, in residual blocks (3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.resnet import BlockName
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, steps_to, verdict, with_range

NONE, BEFORE, AFTER, POSITION = "none", "before", "after", "position"
RESIDUAL_NONE, POST, PRE = "residual-none", "residual-post", "residual-pre"
# The block of lab.models.resnet that each is made of, and its norm.
PLACEMENTS: dict[str, tuple[BlockName, str | None]] = {
    NONE: ("plain", None),
    BEFORE: ("plain", "BatchNorm2d"),
    AFTER: ("plain", "BatchNorm2d"),
    POSITION: ("plain", "PositionBatchNorm2d"),
    RESIDUAL_NONE: ("v1", None),
    POST: ("v1", "BatchNorm2d"),
    PRE: ("preact", "BatchNorm2d"),
}
COMPARED = ((BEFORE, NONE), (BEFORE, AFTER), (BEFORE, POSITION), (POST, RESIDUAL_NONE), (POST, PRE), (POST, BEFORE))
RATES = (0.02, 0.1)
Trials = dict[str, list[TrialRecord]]  # by placement
STEPS = {"quick": 60, "desk": 1600, "full": 20_000}
EVERY = {"quick": 20, "desk": 200, "full": 500}
MARGIN = 0.01  # what is smaller may be luck: the standard error of an accuracy on 2,000 images is 0.008
LEVEL = 0.95  # of what "before" reaches: the accuracy that steps are counted to
NOTES = (
    "Per claim, the differences in accuracy at the end are taken seed by seed. At least as good: with no seed more "
    f"than {100 * MARGIN:g} point behind. Worse: with every seed more than that behind. Otherwise open. The verdict is "
    '"supported" if both claims hold, "contradicted" if one is worse, else "unclear". To be even is enough for "at '
    'least as good", and speaks for neither. Trials that diverge count as 0.',
    "Each placement is trained at two rates, and judged at that with the higher median at the end. The choice is made "
    "on the test images, for all placements alike. The rate falls linearly to 0; SGD with momentum 0.9.",
    "All nets have the same seven convolutions, start from the same weights (He), and take every other pixel in the "
    'first, for speed. "after" keeps the convolutions\' biases: there, beta does not stand for them.',
    "Seven layers train without a norm as well. What a norm's place does to deep nets is not seen here.",
)


class Placement(Experiment):
    """Before against after, per channel against per position; residual blocks for comparison."""

    name = "placement"
    claim = (
        "Batch Normalization directly before the nonlinearity is at least as good as after it; for convolutions, "
        "statistics and parameters per channel are at least as good as per channel and position, of which there are "
        "more."
    )
    source = "Ioffe & Szegedy 2015, section 3.2"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every placement at two rates, so that none is judged by a rate that suits another."""
        shared = {"batch": 32, "width": 8, "momentum": 0.9, "steps": STEPS[scale]}
        return [
            Arm(f"{place}-{rate}", shared | {"placement": place, "block": block, "norm": norm, "rate": rate})
            for place, (block, norm) in PLACEMENTS.items()
            for rate in RATES
        ]

    def training(self, trial: Trial) -> Training:
        """SGD on standardized images, with a rate that falls linearly."""
        settings, found = trial.arm.settings, data.load(trial.data)
        model = net(settings, tuple(found.train.pixels.shape[1:]), len(found.classes))
        models.initialize_(model, seed=trial.seed)  # the same for all arms
        if settings["norm"] != "PositionBatchNorm2d":  # which is several times slower in that layout
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Classification(found).falling_training(trial, model, lambda step: step % EVERY[trial.scale] == 0)

    def findings(self, run: Run) -> Findings:
        """Compare the ends, each placement at its better rate."""
        better = {place: trials for place in PLACEMENTS if (trials := _at_better_rate(run, place))}
        claims = [(BEFORE, AFTER), (BEFORE, POSITION)]
        holds = [is_as_good(_differences(better, *pair)) for pair in claims]
        complete = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict(holds, complete, contradicted_by="any"),
            [_compared(better, *pair) for pair in claims],
            [_ends_table(run, better), _differences_table(better)],
            _figures(better),
            notes=NOTES,
        )


EXPERIMENT = Placement()


def net(settings: Any, shape: tuple[int, ...], classes: int) -> models.ResNet:
    """Return the net of an arm: a convolution of stride 2, six more in three stages of 1, 2 and 4 widths."""
    channels, height, width = shape

    def per_position(features: int) -> nn.Module:
        times = 2 * features // settings["width"]  # the stem halves the size, and so does each doubling of the channels
        return nk.PositionBatchNorm2d(features, -(-height // times), -(-width // times))

    norms: dict[str | None, models.Norm | None] = {None: None, "BatchNorm2d": nk.BatchNorm2d}
    norms["PositionBatchNorm2d"] = per_position
    is_after = settings["placement"] == AFTER
    norm = None if is_after else norms[settings["norm"]]
    model = models.resnet(
        8,
        norm,
        in_channels=channels,
        classes=classes,
        block=settings["block"],
        width=settings["width"],
        stem_stride=2,
        init=None,
    )
    if is_after:
        _append_norms_(model)
    return model


def _append_norms_(model: nn.Module) -> None:
    """Turn each g(Wu + b) into BN(g(Wu + b))."""
    for unit in list(model.modules()):
        if isinstance(unit, nn.Sequential) and isinstance(conv := getattr(unit, "layer", None), nn.Conv2d):
            unit.add_module("norm", nk.BatchNorm2d(conv.out_channels))


# ---- what the records say


def _end(trial: TrialRecord) -> float:
    """The accuracy at the end, 0 if the trial diverged."""
    return 0.0 if trial.end and trial.end["status"] == "diverged" else last(trial)


def _by_rate(run: Run, place: str) -> dict[float, list[TrialRecord]]:
    """The trials of a placement that have ended."""
    ended = {rate: [trial for trial in run.of(f"{place}-{rate}") if trial.end] for rate in RATES}
    return {rate: trials for rate, trials in ended.items() if trials}


def _at_better_rate(run: Run, place: str) -> list[TrialRecord]:
    return max(_by_rate(run, place).values(), key=lambda trials: median(map(_end, trials)), default=[])


def _differences(better: Trials, one: str, other: str) -> list[float]:
    """By how much one ends higher than the other, seed by seed; seeds with which both diverged are left out."""
    theirs = {trial.seed: _end(trial) for trial in better.get(other, [])}
    pairs = [(_end(trial), theirs[trial.seed]) for trial in better.get(one, []) if trial.seed in theirs]
    return [mine - their for mine, their in pairs if mine or their]


def is_as_good(differences: Sequence[float]) -> bool | None:
    """Whether at most the margin is lost; None if seeds disagree."""
    if not differences:
        return None
    return True if min(differences) >= -MARGIN else False if max(differences) < -MARGIN else None


def _order(differences: Sequence[float]) -> str:
    """The order that the differences show, given the margin."""
    if not differences:
        return "unknown"
    if min(differences) > MARGIN or max(differences) < -MARGIN:
        return "ahead" if min(differences) > 0 else "behind"
    return "even" if max(map(abs, differences)) <= MARGIN else "open"


def _compared(better: Trials, one: str, other: str) -> str:
    differences = _differences(better, one, other)
    ends = [f"{place} {_percent(map(_end, better.get(place, [])))}%" for place in (one, other)]
    sizes = [f"{better[place][0].header['parameters']:,}" for place in (one, other) if place in better]
    return (
        f"{one} - {other}: {_percent(differences)} points, {_order(differences)}; {', '.join(ends)}; "
        f"parameters: {', '.join(sizes)}."
    )


def _percent(values: Iterable[float]) -> str:
    return with_range([100 * value for value in values], 2)


def _ends_table(run: Run, better: Trials) -> Table:
    level = round(LEVEL * median(map(_end, better[BEFORE])), 3) if BEFORE in better else 1.0
    rows = []
    for place, trials in better.items():
        ends = [_percent(map(_end, _by_rate(run, place).get(rate, []))) for rate in RATES]
        steps = with_range([steps_to(trial, level) for trial in trials])
        losses = with_range([last(trial, "loss") for trial in trials], 3)
        header = trials[0].header
        rows.append([place, header["parameters"], *ends, header["settings"]["rate"], steps, losses])
    columns = ["placement", "parameters", *(f"accuracy at {rate}" for rate in RATES), "better rate"]
    note = "Median (range) over seeds; accuracies in %. Steps and training loss are those at the better rate."
    return Table("At the end", [*columns, f"steps to {level:.1%}", "training loss"], rows, note)


def _differences_table(better: Trials) -> Table:
    found = {f"{one} - {other}": _differences(better, one, other) for one, other in COMPARED}
    rows = [[name, _percent(differences), _order(differences)] for name, differences in found.items()]
    note = (
        "Points of accuracy at the end, each at its better rate: median (range) over seeds. Ahead or behind: by more "
        f"than {100 * MARGIN:g} point with every seed; even: by no more with any; else open."
    )
    return Table("Differences", ["of", "points", "the first is"], rows, note)


def _figures(better: Trials) -> list[Figure]:
    curves = {place: curve_over_seeds(place, trials) for place, trials in better.items()}
    floor = 0.9 * max((value for curve in curves.values() for value in curve.y), default=0.0)
    plain = [curve for place, curve in curves.items() if PLACEMENTS[place][0] == "plain"]
    residual = [curve for curve in curves.values() if curve not in plain]
    figures = []
    for kind, some in (("plain nets", plain), ("residual nets", residual)):
        for title, shown in ((kind, some), (f"{kind}, close up", [curve.above(floor) for curve in some])):
            note = "Median and range over seeds, each at its better rate."
            figures.append(Figure(f"Test accuracy, {title}", "steps", "accuracy", shown, note))
    return figures
