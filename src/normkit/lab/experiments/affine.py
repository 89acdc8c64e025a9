"""What follows standardizing and what precedes it: gamma and beta, biases, and gradients of the statistics (2, 3)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.lab import data, models
from normkit.lab.data.transforms import binary, drawn_binary
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.measures import accuracy, chance_level
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range
from normkit.moments import Moments

NEITHER, SHIFT, SCALE, BOTH = AFFINES = ("standardize", "shift", "scale", "both")
BIASED, DETACHED, ALONE = BIASES = ("biased", "detached", "detached-biases-alone")
ARMS = (*AFFINES, *BIASES)
STEPS = {"quick": 200, "desk": 6000, "full": 50_000}
EVERY = {"quick": 50, "desk": 200, "full": 500}
ZERO = 1e-3  # a bias' gradient over the weights', and a bias' way over that without the statistics' gradients
FIXED = 0.01  # nats between losses that are the same
NOTES = (
    "(a) holds if the training loss, over the steps before the last evaluation, is lower with gamma and beta than with "
    "neither, in every seed. The loss decides and not the test accuracy, because the paper's argument is about what a "
    "layer can represent; what that is worth on test images is in the table.",
    f"(b) holds if the gradient of no bias before a norm is ever more than {ZERO:g} of the weights' largest, and the "
    f"training loss never {FIXED:g} away from that without biases, in every seed. (c) holds if, with statistics taken "
    f"as constants and the biases alone trained, the farthest bias goes at least half as far in the second half of the "
    f"training as in the first, more than {1 / ZERO:g} times as far as in (b), and the training loss ends within "
    f"{FIXED:g} of where it began, in every seed. The claim is supported if all three hold, contradicted if none does.",
    "The paper's own argument for gamma and beta is about sigmoids, which standardized inputs keep where they are "
    "nearly linear: hence its net of three layers of 100 sigmoids, on binary images, as in `sigmoid-mlp`.",
    "All arms start from the same weights and see the same batches. Biases before norms start as Gaussians of standard "
    "deviation 1, so that they would make a difference if they could. Where biases alone are trained nothing can be "
    "learnt, as in the paper's example: those trials end at chance, and are listed as diverged.",
    "Rules and settings were written down after one look at 3000 steps with one seed, in which the accuracies of the "
    "four kinds of affine map differed by less than a test set's luck, their losses came in the order of the claim, "
    "and biases grew steadily only where they alone were trained: hence (c) is put to the test there. That it says "
    "`can grow`, and not `grows`, came after the first run of 6000 steps and three seeds.",
)


class AffineMaps(Experiment):
    """Gamma and beta one by one, biases that do nothing, and biases that grow for nothing."""

    name = "affine"
    claim = (
        "(a) Gamma and beta give back what standardizing takes from a sigmoid net. (b) A bias before the norm is "
        "redundant. (c) Without gradients through the statistics it can grow and grow while the loss stays."
    )
    source = "Ioffe & Szegedy 2015, sections 2, 3 and 3.2"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Four affine maps; the last of them with biases, with constant statistics, and with nothing else trained."""
        usual = {"affine": True, "has_biases": False, "statistics": "differentiated", "trained": "all"}
        usual |= {"rate": 0.5, "std": 0.01, "batch": 60, "steps": STEPS[scale]}
        biased = usual | {"has_biases": True}
        detached = biased | {"statistics": "constant"}
        affines = [usual | {"affine": affine} for affine in (False, "shift", "scale", True)]
        settings = [*affines, biased, detached, detached | {"trained": "biases"}]
        return [Arm(*arm) for arm in zip(ARMS, settings, strict=True)]

    def training(self, trial: Trial) -> Training:
        """The sigmoid net and the data of section 4.1."""
        settings, found = trial.arm.settings, data.load(trial.data)
        norm = nk.BatchNorm1d if settings["statistics"] == "differentiated" else ConstantStatistics
        pixels, classes = found.train.pixels[0].numel(), len(found.classes)
        model = models.sigmoid_mlp(
            lambda c: norm(c, affine=settings["affine"]), inputs=pixels, classes=classes, std=None
        )
        models.initialize_(model, "gaussian", settings["std"], seed=trial.seed)  # the same for all arms
        layers = [module for module in model.hidden.modules() if isinstance(module, nn.Linear)]
        model.requires_grad_(settings["trained"] == "all")
        if settings["has_biases"]:
            for layer in layers:
                layer.bias = nn.Parameter(torch.randn(layer.out_features))
        images, labels = binary(found.test.pixels), found.test.labels
        start = [layer.bias.detach().clone() for layer in layers if layer.bias is not None]

        def measure(model: nn.Module) -> dict[str, Any]:
            return {"accuracy": accuracy(model, images, labels)} | (_of_biases(layers, start) if start else {})

        return Training(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=settings["rate"]),
            lambda start: data.batches(found.train, settings["batch"], trial.seed, start, drawn_binary),
            settings["steps"],
            lambda step: step % EVERY[trial.scale] == 0,
            measure,
            chance=chance_level(classes),
        )

    def findings(self, run: Run) -> Findings:
        """Compare losses, gradients and how far biases go."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        holds, reasons = zip(*(part(ended) for part in (_restoring, _redundancy, _growth)), strict=True)
        outcome = verdict(holds, is_complete(run, self.arms(run.header["scale"])))
        return Findings(self.claim, self.source, outcome, reasons, [_table(ended)], _figures(run), NOTES)


EXPERIMENT = AffineMaps()


class ConstantStatistics(nk.BatchNorm1d):
    """Batch Normalization whose backward takes the mean and the variance for constants: the mistake of section 2."""

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        batch = batch_core.moments_of(input.detach(), terms.features, None)
        return batch_core.normalize_stored(input, batch, terms), batch


def _of_biases(layers: Sequence[nn.Linear], start: Sequence[Tensor]) -> dict[str, float]:
    """How far the farthest bias has moved from its start, and the last step's gradients, which are still stored."""
    moved = max(_largest(layer.bias - begun) for layer, begun in zip(layers, start, strict=True))
    biases = [layer.bias.grad for layer in layers if layer.bias.grad is not None]
    weights = [layer.weight.grad for layer in layers if layer.weight.grad is not None]
    if not (biases and weights):  # before the first step, or not trained
        return {"moved": moved}
    return {"moved": moved, "gradient": max(map(_largest, biases)) / max(map(_largest, weights))}


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _restoring(run: Run) -> tuple[bool, str]:
    losses = {arm: [_last_loss(trial) for trial in run.of(arm)] for arm in AFFINES}
    lower = [both < neither for both, neither in zip(losses[BOTH], losses[NEITHER], strict=False)]
    ends_at = ", ".join(f"{arm} {with_range(losses[arm], 4)}" for arm in AFFINES)
    ends = {arm: with_range([last(trial) for trial in run.of(arm)], 3) for arm in (NEITHER, BOTH)}
    return bool(lower) and all(lower), (
        f"(a) Training loss at the end: {ends_at}; with both lower than with neither in {sum(lower)} of {len(lower)} "
        f"seeds. Test accuracy: standardize {ends[NEITHER]}, both {ends[BOTH]}."
    )


def _redundancy(run: Run) -> tuple[bool, str]:
    pairs = list(zip(run.of(BOTH), run.of(BIASED), strict=False))
    gradient = max((value for _, trial in pairs for value in trial.series("gradient")[1]), default=float("inf"))
    apart, points = (max((_apart(*pair, key) for pair in pairs), default=float("inf")) for key in ("loss", "accuracy"))
    return gradient <= ZERO and apart < FIXED, (
        f"(b) The largest gradient of a bias before a norm is {gradient:.1g} of the weights' largest; with and without "
        f"such biases training losses are at most {apart:.1g} apart and test accuracies {points:.1g}, over all "
        "evaluations and seeds."
    )


def _growth(run: Run) -> tuple[bool, str]:
    trials, still = run.of(ALONE), run.of(BIASED)
    ways = [last(trial, "moved") for trial in trials]
    halves = [_halves(trial) for trial in trials]
    losses = [trial.series("loss")[1] or [float("nan")] for trial in trials]
    change = max((abs(values[-1] - values[0]) for values in losses), default=float("nan"))
    rest = max((max(trial.series("moved")[1], default=0.0) for trial in still), default=float("nan"))
    grows = all(second >= 0.5 * first > 0 for first, second in halves)
    holds = bool(trials) and grows and rest < ZERO * min(ways) and change < FIXED
    both, detached = ([_last_loss(trial) for trial in run.of(arm)] for arm in (BOTH, DETACHED))
    beside = [last(trial, "moved") for trial in run.of(DETACHED)]
    return holds, (
        f"(c) With constant statistics and the biases alone trained, the farthest bias goes {with_range(ways, 2)}, of "
        f"which {with_range([second for _, second in halves], 2)} in the second half, while the training loss changes "
        f"by at most {change:.1g}; in (b) none goes farther than {rest:.1g}. With everything trained it goes "
        f"{with_range(beside, 2)} and the training loss ends at {with_range(detached, 3)}, where it ends at "
        f"{with_range(both, 3)} with differentiated statistics."
    )


def _last_loss(trial: TrialRecord) -> float:
    """The training loss at the end; infinite if it stopped being finite before."""
    is_broken_off = trial.end is None or trial.end["step"] < trial.header["steps"]
    return float("inf") if is_broken_off else last(trial, "loss")


def _apart(one: TrialRecord, other: TrialRecord, key: str) -> float:
    """The largest difference of two trials, but for that before the first step, when no statistics are stored."""
    theirs, ours = (dict(zip(*trial.series(key), strict=True)) for trial in (one, other))
    return max((abs(theirs[s] - ours[s]) for s in theirs if s > 0 and s in ours), default=float("inf"))


def _halves(trial: TrialRecord) -> tuple[float, float]:
    """How far the farthest bias goes in the first half of the training, and how much farther in the second."""
    moved = trial.series("moved")[1] or [0.0]  # at even distances, from before the first step on
    first = moved[(len(moved) - 1) // 2]
    return first, moved[-1] - first


def _table(run: Run) -> Table:
    rows: list[list[str]] = []
    for arm in ARMS:
        trials = run.of(arm)
        ways = [way for trial in trials for way in trial.series("moved")[1][-1:]]
        gradients = [value for trial in trials for value in trial.series("gradient")[1]]
        ends = [_last_loss(trial) for trial in trials], [last(trial) for trial in trials]
        rows.append([arm, *(with_range(end, 4) for end in ends), _short(ways), _short(gradients)])
    columns = ["arm", "training loss", "test accuracy", "way of the farthest bias", "largest gradient, bias / weight"]
    note = (
        "At the end: median (range) over seeds; of the loss, over the steps since the evaluation before. Gradients: "
        "median (range) over seeds and evaluations. Biases are those before norms."
    )
    return Table("Where training ends, and biases", columns, rows, note)


def _short(values: Sequence[float]) -> str:
    """The median and the range of numbers that may be very small."""
    return f"{median(values):.2g} ({min(values):.2g} to {max(values):.2g})" if values else "-"


def _figures(run: Run) -> list[Figure]:
    def figure(title: str, y_title: str, arms: Sequence[str], key: str) -> Figure:
        curves = [curve_over_seeds(arm, run.of(arm), key) for arm in arms]
        return Figure(title, "steps", y_title, curves, "Median and range over seeds.")

    return [
        figure("Training loss of four affine maps", "training loss", AFFINES, "loss"),
        figure("Test accuracy of four affine maps", "accuracy", AFFINES, "accuracy"),
        figure("How far the farthest bias has gone", "distance from its start", BIASES, "moved"),
        figure("Training loss with biases before norms", "training loss", (BOTH, *BIASES), "loss"),
    ]
