"""Noise after Batch Normalization: distributions drift, and training does not mind (Santurkar et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import agreed, known, paired, probe_median, ratios, settled_accuracy, with_medians
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range
from normkit.snapshot import untouched

PLAIN, BN, NOISY_BN, NOISY_PLAIN = ARMS = ("plain", "bn", "noisy-bn", "noisy-plain")
NETS: dict[Scale, dict[str, Any]] = {
    "quick": {"depth": 11, "width": 4, "batch": 32, "steps": 12},
    "desk": {"depth": 11, "width": 8, "batch": 64, "steps": 1500},
    "full": {"depth": 16, "width": 64, "batch": 128, "steps": 15_000},
}
EVERY = {"quick": 6, "desk": 100, "full": 250}
RATE = 0.1  # the paper's
UNIT_SHIFT, UNIT_SCALE, SHIFT, SCALE = 0.5, 1.25, 0.1, 0.1  # n_mu, n_sig, r_mu, r_sig of its algorithm 1
MARGIN = 0.02  # of accuracy
POPULATION = 8  # batches
PROBE = "ActivationMoments"
DRIFTS = {"mean_drift": "mean", "std_drift": "deviation"}
STATISTICS = {"accuracy": "moving averages", "population": "population statistics"}  # by what is measured with them
NOTES = (
    "(a) holds in a seed if both drifts of noisy-bn, that of the mean and that of the deviation, from one step to the "
    "next, are larger than those of the plain net, and fails if neither is; a trial that diverged leaves it open. (b) "
    f"holds in a seed if noisy-bn ends less than {100 * MARGIN:g} points of test accuracy behind bn, with moving "
    "averages in evaluation. It fails if it ends as far behind with population statistics too, and is open if it does "
    "not. Supported: both hold in every seed. Contradicted: one of them fails in every seed. noisy-plain is a control, "
    "and not part of the verdict.",
    "There is no noise in evaluation, of which the paper says nothing. But moving averages are of noisy activations, "
    "whose scales are an eighth larger on average, and of the last few steps' noise: they do not fit the net that is "
    f"evaluated. Population statistics do: those of {POPULATION} training batches that pass without noise (Algorithm 2 "
    "of the 2015 paper), for bn too. How much of a difference is training's and not theirs, these tell.",
    "Drifts are of what enters the nonlinearities, noise included, on the training batches: of each channel, the "
    "change of its mean in its deviations, and of the logarithm of its deviation; root mean square over channels, "
    "median over layers and measured steps. That batches differ is in all of them alike. The drift from one "
    "evaluation to the next is in the table; the verdict takes that of successive steps, which noise is drawn for.",
    "The end is the median of the last three evaluations, and 0 for a trial that diverged.",
    f"The noise is drawn anew at every step: of each unit a shift from U(-{UNIT_SHIFT:g}, {UNIT_SHIFT:g}) and a scale "
    f"from U(1, {UNIT_SCALE:g}), and about these of each value a shift, uniform within {SHIFT:g}, and a scale, "
    f"Gaussian with a standard deviation of {SCALE:g}; the paper does not say whether that is its variance. Pixels "
    "count as examples.",
    "SGD at a fixed rate of 0.1, Glorot's weights, the same for all arms, no augmentation: the paper's. The desk "
    "scale's net is small (8 convolutions of 8 to 64 channels, batches of 64). Steps were chosen after one look at the "
    "accuracies of plain and bn over 500 steps. The rule was written before noise had been tried, but for population "
    "statistics: in a look at 400 steps with one seed, noisy-bn's training loss was near bn's and its accuracy, which "
    "went up and down, far behind. They were then added, and can turn a contradiction into a verdict that is unclear, "
    "and nothing else; in a second look, at 300 steps, noisy-bn was near bn with them.",
)


class NoisyBatchNorm(Experiment):
    """Batch Normalization, its stable distributions undone by noise."""

    name = "noisy-bn"
    claim = (
        "(a) Noise after each Batch Normalization makes the distributions within a net drift more than those of the "
        "plain net. (b) The net trains as well as without the noise all the same."
    )
    source = "Santurkar et al. 2018, algorithm 1"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """With and without BN, with and without noise."""
        shared = NETS[scale] | {"rate": RATE}
        kinds = [(norm, is_noisy) for is_noisy in (False, True) for norm in (None, "BatchNorm2d")]
        settings = [shared | {"norm": norm, "is_noisy": is_noisy} for norm, is_noisy in kinds]
        return [Arm(*arm) for arm in zip((PLAIN, BN, NOISY_PLAIN, NOISY_BN), settings, strict=True)]

    def training(self, trial: Trial) -> Training:
        """SGD; evaluations come in twos, so that drifts from a step to the next are seen."""
        settings, images, every = trial.arm.settings, Classification(data.load(trial.data)), EVERY[trial.scale]
        found = images.plain_training(trial, net(settings, images), lambda step: step % every in (0, 1))
        if settings["norm"] is not None:
            seen = [x for x, _ in islice(found.batches(0), POPULATION)]
            found.measure = lambda model: _accuracies(model, images, seen)
        found.probes = lambda closure: [nk.probes.ActivationMoments("*.noise")]
        return found

    def findings(self, run: Run) -> Findings:
        """Compare drifts and accuracies."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        every = EVERY[run.header["scale"]]
        factors = {key: ratios(paired(ended, NOISY_BN, PLAIN), _drift(key, _is_next(every))) for key in DRIFTS}
        behind = {key: _behind(ended, key) for key in STATISTICS}
        drifts = [drifts_more(*pair) for pair in zip(*factors.values(), strict=True)]
        holds = [agreed(drifts), agreed([keeps_up(*lost) for lost in zip(*behind.values(), strict=True)])]
        return Findings(
            self.claim,
            self.source,
            verdict(holds, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [_drift_reason(factors, drifts), _end_reason(ended, behind)],
            [_table(ended, every)],
            _figures(run, every),
            NOTES,
        )


EXPERIMENT = NoisyBatchNorm()


class Noise(nn.Module):
    """Algorithm 1's noise on maps (N, C, H, W), in training mode; without noise, the place where it would be."""

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on

    def forward(self, x: Tensor) -> Tensor:
        """Return s x + m, with m and s drawn for each value about those drawn for its channel."""
        if not (self.is_on and self.training):
            return x
        unit = x.new_empty(1, x.shape[1], 1, 1)
        shift, scale = unit.uniform_(-UNIT_SHIFT, UNIT_SHIFT), torch.empty_like(unit).uniform_(1.0, UNIT_SCALE)
        shifts = torch.empty_like(x).uniform_(-SHIFT, SHIFT).add_(shift)
        scales = torch.randn_like(x).mul_(SCALE).add_(scale)
        return scales * x + shifts

    def extra_repr(self) -> str:
        """Whether there is noise."""
        return f"is_on={self.is_on}"


def _accuracies(model: nn.Module, images: Classification, batches: Sequence[Tensor]) -> dict[str, float]:
    """With the statistics that are stored, and with those of the population, both without noise."""
    stored = images.accuracy(model)
    with untouched(model):
        nk.recalibrate(model, batches, method="paper", inplace=True)
        return {"accuracy": stored, "population": images.accuracy(model)}


def net(settings: Any, images: Classification) -> nn.Sequential:
    """Return the net of an arm: each nonlinearity is a module of its own, and before it is a `noise`, on or off."""
    model = images.vgg(None if settings["norm"] is None else nk.BatchNorm2d, settings)
    for unit in list(model.modules()):
        if isinstance(unit, nn.Sequential) and hasattr(unit, "layer"):
            _part_(unit, settings["is_noisy"])
    return model


def _part_(unit: nn.Sequential, is_noisy: bool) -> None:
    """Put noise between a layer, with its norm if it has one, and the ReLU, which may be in the norm."""
    if hasattr(unit, "activation"):
        del unit.activation
    if isinstance(norm := getattr(unit, "norm", None), nk.BatchNorm2d):
        norm.activation = None
    unit.add_module("noise", Noise(is_noisy))
    unit.add_module("activation", nn.ReLU())


# ---- what the records say


def _is_next(every: int) -> Callable[[int], bool]:
    """Evaluations that were a step after another, in which drifts are of that step."""
    return lambda step: step % every == 1 and step > 1


def _is_later(every: int) -> Callable[[int], bool]:
    return lambda step: step % every == 0


def _drift(key: str, at: Callable[[int], bool]) -> Callable[[TrialRecord], float | None]:
    return lambda trial: probe_median(trial, PROBE, key, at)


def drifts_more(mean: float | None, deviation: float | None) -> bool | None:
    """Whether both moments drift more, given how many times as much each does; None if they disagree."""
    if mean is None or deviation is None:
        return None
    return agreed([mean > 1, deviation > 1])


def _behind(run: Run, key: str) -> list[float]:
    """By how much noisy-bn ends behind bn, seed by seed."""
    return [settled_accuracy(bn, key) - settled_accuracy(noisy, key) for noisy, bn in paired(run, NOISY_BN, BN)]


def keeps_up(stored: float, population: float) -> bool | None:
    """Whether noisy-bn is within the margin of bn; None if it is so with population statistics alone."""
    if stored < MARGIN:
        return True
    return False if population >= MARGIN else None


def _drift_reason(factors: dict[str, list[float | None]], drifts: Sequence[bool | None]) -> str:
    times = [f"{with_range(known(factors[key]), 2)} for the {name}" for key, name in DRIFTS.items()]
    return (
        f"(a) From one step to the next, noisy-bn drifts so many times as much as the plain net: {', '.join(times)}; "
        f"both more in {drifts.count(True)} of {len(drifts)} seeds."
    )


def _end_reason(run: Run, behind: dict[str, list[float]]) -> str:
    ends = [f"{arm} {_percent([settled_accuracy(trial) for trial in run.of(arm)])}" for arm in ARMS]
    lost = [f"{_percent(behind[key])} points behind bn with {name}" for key, name in STATISTICS.items()]
    within = [f"{sum(of < MARGIN for of in found)}" for found in behind.values()]
    return (
        f"(b) Test accuracy at the end, in %: {', '.join(ends)}. noisy-bn is {', and '.join(lost)}: less than "
        f"{100 * MARGIN:g} in {' and '.join(within)} of {len(behind['accuracy'])} seeds."
    )


def _percent(values: Sequence[float]) -> str:
    return with_range([100 * value for value in values], 2)


def _table(run: Run, every: int) -> Table:
    rows = []
    for arm in ARMS:
        trials = run.of(arm)
        ends = [_percent([settled_accuracy(t, key) for t in trials if t.series(key)[1]]) for key in STATISTICS]
        losses = with_range([last(trial, "loss") for trial in trials], 3)
        drifts = [[_drift(key, at)(t) for t in trials] for at in (_is_next(every), _is_later(every)) for key in DRIFTS]
        rows.append([arm, *ends, losses, *(with_range(known(of), 3) for of in drifts)])
    columns = ["arm", *(f"accuracy, {name}" for name in STATISTICS.values()), "training loss"]
    columns += [f"drift of the {name}, {span}" for span in ("a step", f"{every - 1} steps") for name in DRIFTS.values()]
    note = (
        "Median (range) over seeds; accuracies in %, at the end; the training loss is with the noise. Drifts: of a "
        "seed, the median over layers and steps."
    )
    return Table("Accuracy and drift", columns, rows, note)


def _figures(run: Run, every: int) -> list[Figure]:
    note = "Median and range over seeds; of layers, the median."

    def drift(key: str, name: str) -> Figure:
        seen = {arm: [with_medians(t, PROBE, {key: key}, _is_next(every)) for t in run.of(arm)] for arm in ARMS}
        curves = [curve_over_seeds(arm, trials, key) for arm, trials in seen.items()]
        return Figure(f"Drift of the {name} from one step to the next", "steps", f"drift of the {name}", curves, note)

    # Without the evaluations a step after another: two values at nearly one place would look like jumps.
    regular = {arm: [with_medians(t, PROBE, {}, _is_later(every)) for t in run.of(arm)] for arm in ARMS}
    accuracies = [curve_over_seeds(arm, trials) for arm, trials in regular.items()]
    accuracy = Figure("Test accuracy", "steps", "accuracy", accuracies, "Median and range over seeds.")
    return [accuracy, *(drift(*of) for of in DRIFTS.items())]
