"""Dividing by l1, l2 and l-infinity norms in place of the deviation (Santurkar et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import settled_accuracy
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, steps_to, verdict, with_range

PLAIN, BN = "plain", "bn"
POWERS = {"l1": 1.0, "l2": 2.0, "linf": float("inf")}
NORMS = (PLAIN, BN, *POWERS)
NETS: dict[Scale, dict[str, Any]] = {
    "quick": {"depth": 11, "width": 4, "batch": 32, "steps": 12},
    "desk": {"depth": 11, "width": 8, "batch": 64, "steps": 600},
    "full": {"depth": 16, "width": 64, "batch": 128, "steps": 15_000},
}
EVERY = {"quick": 6, "desk": 100, "full": 250}
RATES: dict[Scale, tuple[float, ...]] = {"quick": (0.1,), "desk": (0.03, 0.1, 0.3), "full": (0.03, 0.1, 0.3)}
MARGIN = 0.02  # of accuracy
LEVEL = 0.95  # of what BN reaches: the accuracy that steps are counted to
Trials = dict[str, list[TrialRecord]]  # by norm

NOTES = (
    "Per norm, the differences from BN in accuracy at the end are taken seed by seed, each at its best rate. As well "
    f"as BN: with no seed more than {100 * MARGIN:g} points behind. Worse: with every seed more than that behind. "
    'Otherwise open. The verdict is "supported" if all three do as well as BN, "contradicted" if one is worse, else '
    '"unclear". The plain net says what there is to gain, and is not part of the verdict.',
    "The end is the median of the last three evaluations, and 0 for a trial that diverged. The best rate is the one "
    "with the highest median over seeds at the end, chosen on the test images, for all norms alike. The desk scale had "
    "700 steps, and an evaluation every 50, until runs of it turned out to take 10.7 and 10.9 minutes on two slow "
    'cores. Their verdicts were "unclear" twice and, before the norms were written in another order, "supported" once.',
    "The paper says: subtract the mean, divide by the average of the p-norm before the shift. Read here as "
    "(E|x|^p)^(1/p) of a channel over examples and pixels, and as max |x| for infinity. Gradients flow through mean "
    "and norm; gamma and beta follow; evaluation takes moving averages of both, of momentum 0.1, as with BN. "
    "Where a channel's mean is 0, l2 is BN.",
    "The largest of many values is far from their deviation: after l-infinity activations begin several times smaller, "
    "more so with larger batches and maps, until gamma makes up for it.",
    "SGD at a fixed rate, Glorot's weights, the same for all arms, no augmentation: the paper's. The desk scale's net "
    "is small (8 convolutions of 8 to 64 channels, batches of 64). The paper's other experiment, in which l1 did "
    "better than BN in a deep linear net, is not repeated.",
    "The rule was written before any norm had been tried. Rates were chosen after one look at 400 steps with one seed, "
    "in which BN and l1 ended highest at one of the lower two, and l-infinity at the highest.",
)


class LpNorms(Experiment):
    """Batch Normalization with another measure of how large activations are."""

    name = "lp-norms"
    claim = "Normalizing by the average l1, l2 or l-infinity norm does as well as Batch Normalization."
    source = "Santurkar et al. 2018"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every norm, BN and none at each rate, so that none is judged by a rate that suits another."""
        return [
            Arm(f"{norm}-{rate:g}", NETS[scale] | {"norm": norm, "rate": rate})
            for rate in RATES[scale]
            for norm in reversed(NORMS)  # the longest first: at the end a core waits for the last of them
        ]

    def training(self, trial: Trial) -> Training:
        """SGD at a fixed rate."""
        settings, images, every = trial.arm.settings, Classification(data.load(trial.data)), EVERY[trial.scale]
        model = images.vgg(norm_of(settings["norm"]), settings)
        late = settings["steps"] - every // 2  # the end is the median of the last three: they are to be close to it
        return images.plain_training(trial, model, lambda step: step % every == 0 or step == late)

    def findings(self, run: Run) -> Findings:
        """Compare the ends, each norm at its best rate."""
        scale: Scale = run.header["scale"]
        best = {norm: trials for norm in NORMS if (trials := _at_best_rate(run, norm, RATES[scale]))}
        holds = [is_as_good(_differences(best, norm)) for norm in POWERS]
        return Findings(
            self.claim,
            self.source,
            verdict(holds, is_complete(run, self.arms(scale)), contradicted_by="any"),
            [_compared(best, norm) for norm in (*POWERS, PLAIN)],
            [_table(run, best, RATES[scale])],
            _figures(best),
            NOTES,
        )


EXPERIMENT = LpNorms()


class LpNorm2d(nn.Module):
    """Maps (N, C, H, W), each channel less its mean and over its average norm, (E|x|^p)^(1/p); then gamma and beta.

    The norm is that of what comes in, before the mean is subtracted; for p = infinity it is the largest |x|.
    """

    running_mean: Tensor
    running_norm: Tensor

    def __init__(self, features: int, p: float, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.p, self.eps, self.momentum = p, eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_norm", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the batch's statistics in training, and with stored ones in evaluation."""
        if not self.training:
            return _divided(x, self.running_mean, self.running_norm + self.eps, self.weight, self.bias)
        y, mean, norm = _Normalized.apply(x, self.weight, self.bias, self.p, self.eps)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_norm.lerp_(norm, self.momentum)
        return y  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The features and the power."""
        return f"{len(self.weight)}, p={self.p:g}"


class _Normalized(torch.autograd.Function):
    """Maps normalized by their own means and norms, which come back with them, without a gradient.

    The backward is written out: what autograd makes of the formula goes over the maps so often that training with these
    norms took half as long again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float) -> tuple[Tensor, ...]:
        rows = _rows(x)
        mean, norm = rows.mean(0), _average_norm(rows, p)
        divisor = norm + eps
        ctx.save_for_backward(rows, mean, norm, divisor, weight / divisor)
        ctx.p = p
        ctx.mark_non_differentiable(mean, norm)
        return _divided(x, mean, divisor, weight, bias), mean, norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, norm, divisor, scale = ctx.saved_tensors
        rows = _rows(dy)
        dbias = rows.sum(0)
        dweight = ((rows * x).sum(0) - mean * dbias) / divisor
        dx = (rows * scale).sub_(scale * dbias / len(x))
        _add_gradient_of_norm_(dx, x, norm, -scale * dweight, ctx.p)
        return dx.view(dy.movedim(1, -1).shape).movedim(-1, 1), dweight, dbias, None, None


def _divided(x: Tensor, mean: Tensor, divisor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / divisor * weight + bias in one pass, which torch has for variances."""
    return torch.batch_norm(x, weight, bias, mean, divisor.square(), False, 0.0, 0.0, False)


def _add_gradient_of_norm_(dx: Tensor, x: Tensor, norm: Tensor, dnorm: Tensor, p: float) -> None:
    """Add the gradient of x, (M, C), through its average norms: 0 where all values are."""
    if p == 1:
        dx.add_(x.sign().mul_(dnorm / len(x)))
    elif p == 2:
        dx.addcmul_(x, torch.where(norm > 0, dnorm / (norm * len(x)), 0))
    else:  # shared by the largest, if there are several
        row, channel = (x.abs() == norm).nonzero(as_tuple=True)
        shares = dnorm / channel.bincount(minlength=len(norm))
        dx[row, channel] += shares[channel] * x[row, channel].sign()


def average_norm(x: Tensor, p: float) -> Tensor:
    """(E|x|^p)^(1/p) of each channel of (N, C, H, W); max |x| for p = infinity."""
    return _average_norm(_rows(x), p)


def _average_norm(x: Tensor, p: float) -> Tensor:
    # Operator by operator: over the first dimension torch.linalg.vector_norm takes three to seven times as long.
    if p == 1:
        return x.abs().mean(0)
    if p == 2:
        return x.square().mean(0).sqrt_()
    side_by_side = math.gcd(len(x), 16)  # rows: so that even a few channels fill vectors
    return x.abs().view(-1, side_by_side * x.shape[1]).amax(0).view(side_by_side, -1).amax(0)


def _rows(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N H W, C): of channels_last maps a view."""
    return x.movedim(1, -1).flatten(0, -2)


def norm_of(name: str) -> models.Norm | None:
    """What makes the norm of an arm."""
    if name in POWERS:
        return lambda features: LpNorm2d(features, POWERS[name])
    return nk.BatchNorm2d if name == BN else None


# ---- what the records say


def _by_rate(run: Run, norm: str, rates: Sequence[float]) -> dict[float, list[TrialRecord]]:
    """The trials of a norm that have ended."""
    ended = {rate: [trial for trial in run.of(f"{norm}-{rate:g}") if trial.end] for rate in rates}
    return {rate: trials for rate, trials in ended.items() if trials}


def _at_best_rate(run: Run, norm: str, rates: Sequence[float]) -> list[TrialRecord]:
    return max(_by_rate(run, norm, rates).values(), key=lambda of: median(map(settled_accuracy, of)), default=[])


def _differences(best: Trials, norm: str) -> list[float]:
    """By how much a norm ends higher than BN, seed by seed."""
    theirs = {trial.seed: settled_accuracy(trial) for trial in best.get(BN, [])}
    return [settled_accuracy(trial) - theirs[trial.seed] for trial in best.get(norm, []) if trial.seed in theirs]


def is_as_good(differences: Sequence[float]) -> bool | None:
    """Whether at most the margin is lost; None if seeds disagree."""
    if not differences:
        return None
    return True if min(differences) >= -MARGIN else False if max(differences) < -MARGIN else None


def _compared(best: Trials, norm: str) -> str:
    differences, said = _differences(best, norm), {True: "as well", False: "worse", None: "open"}
    ends = [f"{of} {_ends(best.get(of, []))}%" for of in (norm, BN)]
    return f"{norm} - bn: {_percent(differences)} points, {said[is_as_good(differences)]}; {', '.join(ends)}."


def _ends(trials: Sequence[TrialRecord]) -> str:
    return _percent([settled_accuracy(trial) for trial in trials])


def _percent(values: Sequence[float]) -> str:
    return with_range([100 * value for value in values], 2)


def _table(run: Run, best: Trials, rates: Sequence[float]) -> Table:
    level = round(LEVEL * median(map(settled_accuracy, best[BN])), 3) if BN in best else 1.0
    rows = []
    for norm, trials in best.items():
        by_rate = _by_rate(run, norm, rates)
        steps = with_range([steps_to(trial, level) for trial in trials])
        losses = with_range([last(trial, "loss") for trial in trials], 3)
        rate = trials[0].header["settings"]["rate"]
        rows.append([norm, *(_ends(by_rate.get(of, [])) for of in rates), rate, steps, losses])
    columns = ["norm", *(f"accuracy at {rate:g}" for rate in rates), "best rate", f"steps to {level:.1%}"]
    note = "Median (range) over seeds; accuracies in %. Steps and training loss are those at the best rate."
    return Table("At the end", [*columns, "training loss"], rows, note)


def _figures(best: Trials) -> list[Figure]:
    curves = [curve_over_seeds(norm, trials) for norm, trials in best.items()]
    floor = 0.9 * max((value for curve in curves for value in curve.y), default=0.0)
    losses = [curve_over_seeds(norm, trials, "loss") for norm, trials in best.items()]
    note = "Median and range over seeds, each at its best rate."
    return [
        Figure("Test accuracy", "steps", "accuracy", curves, note),
        Figure("Test accuracy, close up", "steps", "accuracy", [curve.above(floor) for curve in curves], note),
        Figure("Training loss", "steps", "training loss", losses, note),
    ]
