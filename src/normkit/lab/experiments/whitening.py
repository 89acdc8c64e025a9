"""Full whitening against standardizing each channel by itself: what it gains, and what it costs (2015, 2; IterNorm)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import agreed, has_diverged, known, settled_accuracy
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, last, steps_to, verdict, with_range

BATCH, NEWTON, GROUPED, ZCA = "batch", "newton", "newton-8", "zca"
NORMS: dict[str, models.Norm] = {
    BATCH: nk.BatchNorm2d,
    NEWTON: nk.WhitenedBatchNorm2d,
    GROUPED: partial(nk.WhitenedBatchNorm2d, group_size=8),
    ZCA: partial(nk.WhitenedBatchNorm2d, method="zca"),
}
RATES = (0.03, 0.1)
STEPS = {"quick": 20, "desk": 1000, "full": 20_000}
EVERY = {"quick": 10, "desk": 50, "full": 250}
MOMENTUM = 0.9
LEVEL = 0.98  # of what BN ends with: the accuracy that steps are counted to
DEARER, AS_CHEAP = 1.5, 1.1  # times BN's time for a step
NOTES = (
    f"Steps are counted to {LEVEL:g} of the accuracy that BN ends with in the same seed, the median of its last three. "
    "(a) holds in a seed if newton, which whitens all channels of a layer together, takes fewer steps to that than BN, "
    "and fails if it takes more, or never gets there; as many leave it open. (b) holds if a step of newton takes at "
    f"least {DEARER:g} times as long as one of BN, and fails if it takes less than {AS_CHEAP:g} times as long. "
    "Supported: both hold in every seed. Contradicted: one fails in every seed.",
    "Each norm is trained at two rates, and judged at that with the higher median at the end, chosen on the test "
    f"images for all alike. The rate falls linearly to 0; SGD with momentum {MOMENTUM:g}, batches of 64.",
    "zca whitens exactly, by eigenvectors; newton approximates that in five iterations; newton-8 whitens eight "
    "channels at a time. The net: eight layers in residual blocks of 8 to 32 channels, from the same weights for all "
    "arms. Wider layers cost more: a covariance has the square of their channels.",
    "Times are those of trials that ran side by side on one core each, without measurements: ratios of a tenth more or "
    "less say nothing.",
    "The rule was written before any of these nets had been trained.",
)


class Whitening(Experiment):
    """One net, its channels standardized one by one or whitened together."""

    name = "whitening"
    claim = (
        "(a) Whitening the channels of a layer together trains in fewer steps than standardizing each by itself, (b) "
        "and takes longer for a step."
    )
    source = "Ioffe & Szegedy 2015, section 2; Huang et al. 2018 and 2019"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every norm at two rates."""
        shared = {"batch": 64, "momentum": MOMENTUM, "steps": STEPS[scale]}
        return [Arm(f"{norm}-{rate}", shared | {"norm": norm, "rate": rate}) for norm in NORMS for rate in RATES]

    def training(self, trial: Trial) -> Training:
        """SGD with a rate that falls linearly."""
        settings, images, every = trial.arm.settings, Classification(data.load(trial.data)), EVERY[trial.scale]
        model = images.small_resnet(NORMS[settings["norm"]], trial.seed)
        return images.falling_training(trial, model, lambda step: step % every == 0)

    def findings(self, run: Run) -> Findings:
        """Compare steps to BN's accuracy, and the time that they take."""
        chosen = {norm: at_better_rate(run, norm) for norm in NORMS}
        seeds = sorted(set(chosen[BATCH]) & set(chosen[NEWTON]))
        pairs = [(chosen[NEWTON][seed], chosen[BATCH][seed]) for seed in seeds]
        parts = [agreed([is_faster(*pair) for pair in pairs]), agreed([is_dearer(*pair) for pair in pairs])]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [_steps_reason(pairs), _time_reason(pairs), _in_all_reason(pairs)],
            [_table(chosen)],
            _figures(chosen),
            NOTES,
        )


EXPERIMENT = Whitening()


# ---- what the records say

BySeed = Mapping[int, TrialRecord]


def at_better_rate(run: Run, norm: str) -> BySeed:
    """The trials of a norm that have ended, at the rate with the higher median at the end."""
    by_rate = [[trial for trial in run.of(f"{norm}-{rate}") if trial.end] for rate in RATES]
    better = max(filter(None, by_rate), key=lambda trials: median(map(settled_accuracy, trials)), default=[])
    return {trial.seed: trial for trial in better}


def _steps(trial: TrialRecord, batch: TrialRecord) -> float | None:
    """Steps of a trial to nearly what BN ends with; None if it never gets there."""
    return None if has_diverged(trial) else steps_to(trial, LEVEL * settled_accuracy(batch))


def is_faster(trial: TrialRecord, batch: TrialRecord) -> bool | None:
    """(a) Fewer steps than BN's; None for as many, or if BN diverged."""
    mine, theirs = _steps(trial, batch), _steps(batch, batch)
    if theirs is None or mine == theirs:
        return None
    return mine is not None and mine < theirs


def seconds_per_step(trial: TrialRecord) -> float:
    """The time of a step, without what is measured."""
    assert trial.end is not None
    return float(trial.end["seconds"]) / max(1, int(trial.end["step"]))


def is_dearer(trial: TrialRecord, batch: TrialRecord) -> bool | None:
    """(b) Clearly longer for a step than BN; None in between."""
    ratio = _dearness(trial, batch)
    return True if ratio >= DEARER else False if ratio < AS_CHEAP else None


def _dearness(trial: TrialRecord, batch: TrialRecord) -> float:
    return seconds_per_step(trial) / max(seconds_per_step(batch), 1e-9)


Pairs = Sequence[tuple[TrialRecord, TrialRecord]]


def _ratio_of_steps(trial: TrialRecord, batch: TrialRecord) -> float | None:
    mine, theirs = _steps(trial, batch), _steps(batch, batch)
    return None if mine is None or theirs is None else theirs / max(mine, 1)


def _steps_reason(pairs: Pairs) -> str:
    ratios = [_ratio_of_steps(*pair) for pair in pairs]
    return (
        f"(a) To {LEVEL:g} of BN's accuracy, BN takes {with_range(ratios, 2, never=0.0)} times as many steps as newton."
    )


def _time_reason(pairs: Pairs) -> str:
    return f"(b) A step of newton takes {with_range([_dearness(*pair) for pair in pairs], 2)} times as long as BN's."


def _in_all_reason(pairs: Pairs) -> str:
    found = [(_ratio_of_steps(*pair), _dearness(*pair)) for pair in pairs]
    ratios = [None if steps is None else steps / dearness for steps, dearness in found]
    return f"In time, BN takes {with_range(ratios, 2, never=0.0)} times as long to that accuracy as newton."


def _percent(values: Iterable[float]) -> str:
    return with_range([100 * value for value in values], 1)


def _table(chosen: Mapping[str, BySeed]) -> Table:
    rows = []
    for norm, trials in chosen.items():
        pairs = [(trial, chosen[BATCH][seed]) for seed, trial in trials.items() if seed in chosen[BATCH]]
        rates = sorted({trial.header["settings"]["rate"] for trial in trials.values()})
        rows.append(
            [
                norm,
                ", ".join(map(str, rates)),
                _percent(map(settled_accuracy, trials.values())),
                with_range(known([last(t, "loss") for t in trials.values() if t.series("loss")[1]]), 3),
                with_range([_steps(*pair) for pair in pairs]),
                with_range([1000 * seconds_per_step(trial) for trial in trials.values()], 1),
            ]
        )
    columns = ["norm", "better rate", "accuracy", "training loss", f"steps to {LEVEL:g} of BN's accuracy", "ms a step"]
    return Table("Gain and cost", columns, rows, "At the better rate; accuracies in %: median (range) over seeds.")


def _figures(chosen: Mapping[str, BySeed]) -> list[Figure]:
    trials = {norm: [*of.values()] for norm, of in chosen.items() if of}
    note = "At the better rate: median and range over seeds."
    by_step, by_time = ([curve_over_seeds(norm, of, x=x) for norm, of in trials.items()] for x in ("step", "seconds"))
    return [
        Figure("Test accuracy", "steps", "accuracy", by_step, note),
        Figure("Test accuracy against time", "seconds of training", "accuracy", by_time, note),
    ]
