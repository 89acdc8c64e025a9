"""Deep residual nets without norms, that do and that do not train (Zhang et al. 2019; Brock et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.norm_free import ScalarBias, norm_free_resnet
from normkit.lab.probed import agreed, settled_accuracy
from normkit.lab.record import Run
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range

PLAIN, BATCH, FIXUP, SCALED, CLIPPED = "plain", "batch", "fixup", "scaled", "scaled-clipped"
KINDS = (PLAIN, BATCH, FIXUP, SCALED, CLIPPED)
JUDGED = (FIXUP, SCALED)
RATES = (0.01, 0.03, 0.1)
DEPTHS = {"quick": 8, "desk": 56, "full": 110}
STEPS = {"quick": 10, "desk": 600, "full": 20_000}
EVERY = {"quick": 10, "desk": 100, "full": 500}
MOMENTUM, CLIP = 0.9, 0.04
TRAINS = 0.6  # of test images: far above chance, and far below what these nets reach if they train
NOTES = (
    "A net trains at a rate if its test accuracy, the median of the last three measured, is at least "
    f"{100 * TRAINS:g}%; that of a trial that diverged is 0. (a) holds in a seed if the plain net trains at none of "
    "the three rates, and fails if it trains at one of them. (b) holds if Fixup and scaled weight standardization both "
    "train at one of them, and fails if neither does. Supported: both hold in every seed. Contradicted: one fails in "
    "every seed.",
    "plain and batch are the same residual net, without norms and with Batch Normalization, from the same weights "
    "(He). fixup has a bias before every layer and activation and a multiplier per branch, whose rates are a tenth of "
    "the others', as its authors'. scaled has standardized kernels and branches that begin as zero, and divides what "
    "enters them by the deviation that it is expected to have; scaled-clipped clips gradients by units against their "
    f"weights, at {CLIP:g}.",
    f"SGD with momentum {MOMENTUM:g}, batches of 32, at constant rates; no augmentation and no regularization, which "
    "these methods need for their best accuracy. What is asked here is whether they train at all. The last tables say "
    "how far they are behind Batch Normalization, and at how many of the rates.",
    "The rule was written before any of these nets had been trained.",
)


class NormFree(Experiment):
    """One depth; with norms, without, and with what takes their place."""

    name = "norm-free"
    claim = (
        "(a) At a depth where a residual net without norms does not train, (b) Fixup and scaled weight standardization "
        "do, without norms."
    )
    source = "Zhang et al. 2019; Brock et al. 2021"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every net at three rates: without norms, the range that works is narrow."""
        shared = {"depth": DEPTHS[scale], "width": 8, "batch": 32, "steps": STEPS[scale], "momentum": MOMENTUM}
        return [
            Arm(f"{kind}-{rate}", shared | {"kind": kind, "rate": rate, "clip": CLIP if kind == CLIPPED else None})
            for kind in KINDS
            for rate in RATES
        ]

    def training(self, trial: Trial) -> Training:
        """SGD at a constant rate."""
        settings, images, every = trial.arm.settings, Classification(data.load(trial.data)), EVERY[trial.scale]
        model = net(settings, images, trial.seed).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return images.training(trial, model, sgd(model, settings), lambda step: step % every == 0)

    def findings(self, run: Run) -> Findings:
        """Say which nets train, and how well."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        found = {kind: trains(ended, kind) for kind in KINDS}
        seeds = sorted(set.intersection(*(set(of) for of in found.values())))
        parts = [
            agreed([not found[PLAIN][seed] for seed in seeds]),
            agreed([agreed([bool(found[kind][seed]) for kind in JUDGED]) for seed in seeds]),
        ]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [_reason(found, seeds), _accuracy_reason(ended)],
            [_table(ended)],
            _figures(run),
            NOTES,
        )


EXPERIMENT = NormFree()


# ---- nets


def net(settings: Mapping[str, Any], images: Classification, seed: int) -> nn.Module:
    """Return the net of an arm, its weights drawn by the seed."""
    sizes = {"in_channels": images.channels, "classes": images.classes, "width": settings["width"], "stem_stride": 2}
    if settings["kind"] == FIXUP:
        return norm_free_resnet(settings["depth"], "fixup", seed=seed, **sizes)
    if settings["kind"] in (SCALED, CLIPPED):
        return norm_free_resnet(settings["depth"], "scaled", seed=seed, **sizes)
    model = models.resnet(settings["depth"], nk.BatchNorm2d if settings["kind"] == BATCH else None, init=None, **sizes)
    models.initialize_(model, seed=seed)
    return model


class ClippedSGD(torch.optim.SGD):
    """SGD on gradients that are clipped unit by unit: of the first group's weights."""

    clip: float

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, then step."""
        nk.adaptive_gradient_clip_(self.param_groups[0]["params"], self.clip)
        return super().step(closure)  # type: ignore[no-any-return]


def sgd(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.SGD:
    """Return the optimizer: the numbers of Fixup learn more slowly, and the classifier is not clipped."""
    numbers = (ScalarBias, nk.SkipInit) if settings["kind"] == FIXUP else ()
    slow = [p for module in model.modules() if isinstance(module, numbers) for p in module.parameters()]
    last_layer, rate = list(model.classifier.parameters()), settings["rate"]  # type: ignore[union-attr]
    apart = {id(p) for p in (*slow, *last_layer)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in apart], "lr": rate},
        {"params": last_layer, "lr": rate},
        {"params": slow, "lr": rate / 10},
    ]
    groups = [group for group in groups if group["params"]]
    if settings["clip"] is None:
        return torch.optim.SGD(groups, lr=rate, momentum=settings["momentum"])
    optimizer = ClippedSGD(groups, lr=rate, momentum=settings["momentum"])
    optimizer.clip = settings["clip"]
    return optimizer


# ---- what the records say


def trains(run: Run, kind: str) -> dict[int, list[float]]:
    """The rates at which a net trains, by seed; seeds that have not ended at all rates are left out."""
    found: dict[int, dict[float, bool]] = {}
    for rate in RATES:
        for trial in run.of(f"{kind}-{rate}"):
            found.setdefault(trial.seed, {})[rate] = settled_accuracy(trial) >= TRAINS
    return {seed: [rate for rate in RATES if of[rate]] for seed, of in found.items() if len(of) == len(RATES)}


def best(run: Run, kind: str) -> list[float]:
    """The accuracy of a net at the rate that suits it, seed by seed."""
    by_seed: dict[int, float] = {}
    for rate in RATES:
        for trial in run.of(f"{kind}-{rate}"):
            by_seed[trial.seed] = max(by_seed.get(trial.seed, 0.0), settled_accuracy(trial))
    return [by_seed[seed] for seed in sorted(by_seed)]


def _percent(values: Iterable[float]) -> str:
    return with_range([100 * value for value in values], 1)


def _reason(found: Mapping[str, Mapping[int, Sequence[float]]], seeds: Sequence[int]) -> str:
    counts = ", ".join(f"{kind} {sum(bool(found[kind][seed]) for seed in seeds)}" for kind in KINDS)
    rates = ", ".join(f"{kind} {with_range([len(found[kind][seed]) for seed in seeds])}" for kind in KINDS)
    return f"(a, b) Of {len(seeds)} seeds so many train at one of the rates: {counts}; of three rates: {rates}."


def _accuracy_reason(run: Run) -> str:
    return (
        "Test accuracy at the best rate, in %: "
        + ", ".join(f"{kind} {_percent(best(run, kind))}" for kind in KINDS)
        + "."
    )


def _table(run: Run) -> Table:
    rows = []
    for kind in KINDS:
        trials = [run.of(f"{kind}-{rate}") for rate in RATES]
        ends = [_percent(map(settled_accuracy, of)) for of in trials]
        losses = [with_range([last(trial, "loss") for trial in of if trial.series("loss")[1]], 2) for of in trials]
        rows.append([kind, *ends, *losses])
    columns = ["net", *(f"accuracy at {rate}" for rate in RATES), *(f"training loss at {rate}" for rate in RATES)]
    note = "Accuracies in %; 0 after a divergence: median (range) over seeds."
    return Table("With norms and without", columns, rows, note)


def _figures(run: Run) -> list[Figure]:
    note = "Median and range over seeds."

    def at(rate: float) -> Figure:
        curves = [curve_over_seeds(kind, run.of(f"{kind}-{rate}")) for kind in KINDS]
        return Figure(f"Test accuracy at a rate of {rate}", "steps", "accuracy", curves, note)

    return [at(rate) for rate in RATES]
