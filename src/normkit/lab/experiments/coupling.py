"""What batch-mates do to an example, in training and in evaluation, and whether their noise regularizes (3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import linear_regression, median
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Curve, Figure, Table
from normkit.instruments.probe import Watched
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.data.transforms import standardized
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.measures import accuracy
from normkit.lab.models.relu_nets import relu_net
from normkit.lab.probed import agreed, has_diverged, paired
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range

NETS = ("mlp", "conv")
CHUNKS = (4, 16, 64)  # examples whose statistics are taken together
JUDGED = "chunk-16"
KINDS = ("plain", *(f"chunk-{chunk}" for chunk in CHUNKS), "whole")
STEPS = {"quick": 20, "desk": 2000, "full": 10_000}
EVERY = {"quick": 20, "desk": 500, "full": 1000}
HIDDEN = {
    "mlp": {"quick": (16, 16), "desk": (100, 100), "full": (500, 500, 500)},
    "conv": {"quick": (4, 8), "desk": (8, 16, 32), "full": (32, 64, 128)},
}
SIZES = {"quick": (2, 8, 32), "desk": (2, 4, 8, 16, 32, 64, 128, 256), "full": (2, 4, 8, 16, 32, 64, 128, 256)}
FOLLOWED = {"quick": 4, "desk": 16, "full": 16}  # examples, and batches that each of them is in
IMAGES = 500  # to train on
FROM = 8  # the smallest batch that the slope is fitted to
SLOPE, TOLERANCE = -0.5, 0.1  # of movement by batch size on logarithmic axes, and how far it may be off
ROUNDING = 1e-5  # of the distance between examples' outputs
MARGIN = 0.01  # of accuracy, which is more than the standard error on 2,000 images
NOTES = (
    "Movement is the root mean square distance of an example's outputs, over batches with other mates, from their "
    "mean, over that of different examples' outputs. (a) holds for a net if, before and in training, movement is more "
    f"than {ROUNDING:g} in training at every size of batch and no more than that in evaluation, and in the plain net "
    f"in neither. (b) holds if movement in training goes by the batch size to a power within {TOLERANCE:g} of "
    f"{SLOPE:g}, fitted from batches of {FROM} on, untrained and trained: as the error of a mean of independent values "
    "does. "
    "(c) holds if the accuracy on training images is less far above that on test images with statistics of chunks of "
    "16 than with those of the whole batch.",
    "With a seed, each part holds if it does for both nets, and fails if it does for neither. The claim is supported "
    "if all parts hold with every seed and no test accuracy with chunks of 16 is more than "
    f"{100 * MARGIN:g} point below that with the whole batch: a gap that closes because nothing is learnt is no "
    "regularization. It is contradicted if one part fails with every seed.",
    f"Nets are trained on {IMAGES} images drawn by the seed, in batches of 128, all from the same weights with plain "
    "SGD at one rate. Chunks are of GhostBatchNorm, which changes nothing but the statistics.",
    "Mates are drawn from the test images without repetition. Of 2,000 images, batches of 256 take so many that "
    "movement is 7% less there, and the slope steeper by nearly 0.02.",
    "Rules were written after short looks at the MLP with one seed: of movement before training and after 600 steps, "
    "and of accuracies up to 600 steps, where all nets came to 100% on training images and to within 2 points of each "
    "other on test images. The convolutional net was timed afterwards, over 300 steps with one seed; it learnt so much "
    "more slowly that the steps were doubled. The rules were left as they were.",
)


class Coupling(Experiment):
    """How far outputs move with batch-mates, and the gap between training and test images by how noisy batches are."""

    name = "coupling"
    claim = (
        "In training an example's output depends on its batch-mates, (a) and in evaluation it does not; (b) the "
        "dependence falls as one over the root of the batch. (c) Its noise regularizes."
    )
    source = "Ioffe & Szegedy 2015, section 3.4"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Two nets: without norms, with statistics of chunks, and with those of the whole batch."""
        shared = {"rate": 0.1, "batch": 128, "images": IMAGES, "steps": STEPS[scale], "followed": FOLLOWED[scale]}
        chunks = dict(zip(KINDS, (None, *CHUNKS, None), strict=True))
        return [
            Arm(
                f"{net}-{kind}",
                shared
                | {"net": net, "hidden": list(HIDDEN[net][scale]), "has_norms": kind != "plain", "chunk": chunk}
                | {"sizes": [] if chunk else list(SIZES[scale])},
            )
            for net in NETS
            for kind, chunk in chunks.items()
        ]

    def training(self, trial: Trial) -> Training:
        """SGD on few images; movement is measured where batches are not cut into chunks."""
        settings, found = trial.arm.settings, data.load(trial.data)
        chosen = torch.randperm(len(found.train.labels))[: settings["images"]]
        few = replace(found, train=data.Images(found.train.pixels[chosen], found.train.labels[chosen]))
        model = relu_net(settings, _norm(settings), few).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.initialize_(model, seed=trial.seed)  # the same for all arms
        optimizer, every = torch.optim.SGD(model.parameters(), lr=settings["rate"]), EVERY[trial.scale]
        training = Classification(few).training(trial, model, optimizer, lambda step: step % every == 0)
        prepare, on_test = standardized(few.train.pixels), training.measure
        images, others = prepare(few.train.pixels), prepare(few.test.pixels)

        def measure(model: nn.Module) -> dict[str, Any]:
            own = {"training_accuracy": accuracy(model, images, few.train.labels)}
            return on_test(model) | own | movements(model, others, settings["sizes"], settings["followed"])

        training.measure = measure
        return training

    def findings(self, run: Run) -> Findings:
        """Judge the three parts."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end and trial.measured])
        judges: tuple[Judge, ...] = (is_coupled, is_root, is_narrower)
        parts = [agreed(_by_seed(ended, judge)) for judge in judges]
        complete = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict(parts, complete, also=[_keeps_accuracy(ended)], contradicted_by="any"),
            [_movement_reason(ended), _slope_reason(ended), _gap_reason(ended)],
            [_movement_table(ended), _gap_table(ended)],
            [_movement_figure(ended), *(_gap_figure(ended, net) for net in NETS)],
            NOTES,
        )


EXPERIMENT = Coupling()


def _norm(settings: Mapping[str, Any]) -> models.Norm | None:
    is_conv, chunk = settings["net"] == "conv", settings["chunk"]
    if not settings["has_norms"]:
        return None
    if chunk is None:
        return nk.BatchNorm2d if is_conv else nk.BatchNorm1d
    return partial(nk.GhostBatchNorm2d if is_conv else nk.GhostBatchNorm1d, chunk_size=chunk)


def movements(model: nn.Module, inputs: Tensor, sizes: Sequence[int], followed: int) -> dict[str, Any]:
    """How far outputs move with batch-mates in batches of several sizes: in training by size, in evaluation at most."""
    found = []
    for size in sizes:
        probe = nk.probes.BatchCoupling(inputs, size, examples=followed, draws=followed)
        found += [numbers for _, numbers in probe.before_update(Watched(model, None))]
    if not found:
        return {}
    return {"moved": [n["training"] for n in found], "moved_in_evaluation": max(n["evaluation"] for n in found)}


# ---- what the records say

Trials = Mapping[str, TrialRecord]  # of one net with one seed, by kind
Judge = Callable[[Trials], bool | None]


def is_coupled(trials: Trials) -> bool:
    """(a) Outputs move in training alone, and in the plain net not at all."""
    whole, plain = trials["whole"].measured, trials["plain"].measured
    still = [line["moved_in_evaluation"] for line in (*whole, *plain)] + [m for line in plain for m in line["moved"]]
    return bool(max(still) <= ROUNDING < min(m for line in whole for m in line["moved"]))


def is_root(trials: Trials) -> bool:
    """(b) Movement falls as one over the root of the batch, untrained and trained."""
    return all(abs(slope - SLOPE) <= TOLERANCE for slope in slopes(trials["whole"]))


def slopes(trial: TrialRecord) -> tuple[float, float]:
    """The power of the batch size that movement goes by, at the first measurement and at the last."""
    sizes = trial.header["settings"]["sizes"]

    def slope(moved: Sequence[float]) -> float:
        points = [(math.log(n), math.log(m)) for n, m in zip(sizes, moved, strict=True) if n >= FROM and m]
        return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else math.nan

    return slope(trial.measured[0]["moved"]), slope(trial.measured[-1]["moved"])


def is_narrower(trials: Trials) -> bool | None:
    """(c) The gap is narrower with chunks; None where nothing was learnt, and so nothing can be regularized."""
    pair = trials[JUDGED], trials["whole"]
    return None if any(map(has_diverged, pair)) else gap(pair[0]) < gap(pair[1])


def gap(trial: TrialRecord) -> float:
    """By how much training images are classified better than test images at the end."""
    return last(trial, "training_accuracy") - last(trial)


def _by_seed(run: Run, judge: Judge) -> list[bool | None]:
    """For each seed what both nets say; None if they differ, or if a trial is missing."""
    found = []
    for seed in sorted({trial.seed for trial in run.trials}):
        nets = [{kind: t for kind in KINDS for t in run.of(f"{net}-{kind}") if t.seed == seed} for net in NETS]
        found.append(agreed([judge(trials) if len(trials) == len(KINDS) else None for trials in nets]))
    return found


def _keeps_accuracy(run: Run) -> bool:
    pairs = [pair for net in NETS for pair in paired(run, f"{net}-{JUDGED}", f"{net}-whole")]
    return all(last(one) >= last(other) - MARGIN for one, other in pairs)


def _movement_reason(run: Run) -> str:
    lines = {kind: [line for net in NETS for t in run.of(f"{net}-{kind}") for line in t.measured] for kind in KINDS}
    moved = {kind: [m for line in lines[kind] for m in line["moved"]] for kind in ("whole", "plain")}
    still = [line["moved_in_evaluation"] for line in lines["whole"]]
    return (
        f"(a) With batch-mates outputs move by {min(moved['whole'], default=math.nan):.2g} to "
        f"{max(moved['whole'], default=math.nan):.2g} of the distance between examples in training, by up to "
        f"{max(still, default=math.nan):.1g} in evaluation, and by up to {max(moved['plain'], default=math.nan):.1g} "
        "in the plain net in training."
    )


def _slope_reason(run: Run) -> str:
    found = {net: [slopes(trial) for trial in run.of(f"{net}-whole")] for net in NETS}
    texts = [
        f"{net} {with_range([of[i] for of in each], 3)} {when}"
        for net, each in found.items()
        for i, when in enumerate(("untrained", "trained"))
    ]
    return f"(b) Movement goes by the batch size to the power of: {', '.join(texts)}."


def _gap_reason(run: Run) -> str:
    texts = []
    for net in NETS:
        pairs = paired(run, f"{net}-{JUDGED}", f"{net}-whole")
        narrower = sum(gap(one) < gap(other) for one, other in pairs)
        both = [with_range([100 * gap(pair[i]) for pair in pairs], 2) for i in (0, 1)]
        texts.append(f"{net} {both[0]} with chunks of 16 and {both[1]} with the whole batch, narrower in {narrower} of")
        texts[-1] += f" {len(pairs)} seeds"
    return f"(c) Points of accuracy by which training images are ahead of test images: {'; '.join(texts)}."


# ---- tables and figures


def _movement_table(run: Run) -> Table:
    rows = []
    for arm in (f"{net}-{kind}" for net in NETS for kind in ("whole", "plain")):
        trials = run.of(arm)
        for i, size in enumerate(trials[0].header["settings"]["sizes"] if trials else ()):
            ends = [[trial.measured[at]["moved"][i] for trial in trials] for at in (0, -1)]
            rows.append([arm, size, *(with_range(values, 4) for values in ends)])
    note = "In training, over the distance between different examples' outputs: median (range) over seeds."
    return Table("Movement with batch-mates", ["arm", "batch", "untrained", "trained"], rows, note)


def _gap_table(run: Run) -> Table:
    rows = []
    for arm in (f"{net}-{kind}" for net in NETS for kind in KINDS):
        trials = run.of(arm)
        columns = [[last(t, "training_accuracy") for t in trials], [last(t) for t in trials], [gap(t) for t in trials]]
        cells = [with_range([100 * value for value in values], 2) for values in columns]
        rows.append([arm, *cells, with_range([last(trial, "loss") for trial in trials], 4)])
    note = "In %, at the end: median (range) over seeds. The loss is that of the last steps, with batch statistics."
    return Table("Training and test images", ["arm", "on training images", "on test images", "gap", "loss"], rows, note)


def _movement_figure(run: Run) -> Figure:
    curves = []
    for net in NETS:
        trials = run.of(f"{net}-whole")
        for at, when in ((0, "untrained"), (-1, "trained")) if trials else ():
            values = list(zip(*(trial.measured[at]["moved"] for trial in trials), strict=True))
            curves.append(Curve(f"{net}, {when}", trials[0].header["settings"]["sizes"], [*map(median, values)]))
    note = "In training: median over seeds."
    return Figure("Movement by batch size", "batch", "movement", curves, note, log_x=True, log_y=True)


def _gap_figure(run: Run, net: str) -> Figure:
    curves = [curve_over_seeds(kind, run.of(f"{net}-{kind}")) for kind in KINDS]
    return Figure(f"Test accuracy, {net}", "steps", "accuracy", curves, "Median and range over seeds.")
