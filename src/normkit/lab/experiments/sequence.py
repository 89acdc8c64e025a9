"""A small transformer over characters: norms before and after its branches, and four kinds of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf, isfinite, log
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.transformer import TokenBatchNorm, transformer
from normkit.lab.prediction import Prediction, loss
from normkit.lab.probed import agreed, has_diverged
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_of_medians, curve_over_seeds, is_complete, last, verdict, with_range
from normkit.snapshot import untouched

LAYER, RMS, SCALE, BATCH = "layer", "rms", "scale", "batch"
NORMS: dict[str, models.Norm] = {LAYER: nk.LayerNorm, RMS: nk.RMSNorm, SCALE: nk.ScaleNorm, BATCH: TokenBatchNorm}
PRE, POST = "pre", "post"
KINDS = {f"{place}-{norm}": (place, norm) for place, norm in (*((PRE, norm) for norm in NORMS), (POST, LAYER))}
SIZES: dict[Scale, dict[str, int]] = {
    "quick": {"width": 16, "blocks": 2, "heads": 2, "length": 32, "batch": 8, "steps": 12, "test": 1000},
    "desk": {"width": 64, "blocks": 6, "heads": 4, "length": 64, "batch": 8, "steps": 800, "test": 50_000},
    "full": {"width": 512, "blocks": 6, "heads": 8, "length": 256, "batch": 64, "steps": 100_000, "test": 500_000},
}
RATES: dict[Scale, tuple[float, ...]] = {
    "quick": (0.001, 0.01),
    "desk": (0.001, 0.003, 0.01, 0.03),
    "full": (0.0001, 0.0003, 0.001, 0.003),
}
EVERY = {"quick": 6, "desk": 200, "full": 1000}
POPULATION = 8  # batches
TRAINS = 0.5  # of what the best net of the seed learns
MARGIN = 0.05  # bits per character
NOTES = (
    "Bits per character are of the test text, each character predicted from those before it in its window; a trial's "
    "are the lowest that it measured, and infinite if it diverged. A trial trains if it is below the bits of a code by "
    "the characters' frequencies alone by at least half as much as the best trial of its seed. (a) holds in a seed if, "
    "with layer norm, pre-norm trains at more of the rates than post-norm; it is open if both train at all of them, or "
    "at none, and fails otherwise. In (b) and (c) all norms are before the branches, each at the rate with the lowest "
    f"median over seeds. (b) holds if RMSNorm and ScaleNorm are both less than {MARGIN:g} bits behind layer norm, and "
    f"fails if one of them is {2 * MARGIN:g} or more behind. (c) holds if batch norm, with moving averages in "
    f"evaluation, is more than {MARGIN:g} bits behind layer norm, and fails if it is not behind. Supported: all parts "
    "hold in every seed. Contradicted: one part fails in every seed.",
    f"{MARGIN:g} bits are three to four standard errors of a mean over the 47,282 characters of the test text: 0.011 "
    "to 0.017 bits, from means over blocks of 500 characters, for codes by the counts of two, three and four "
    "characters in a row. Between two nets that are tested on the same characters luck does less than that.",
    "Adam without a warm-up, at rates that fall linearly to 0 from the first step on: what a warm-up would mend is "
    "what (a) is about. No clipping, which would hide it, no decay, no dropout. The rates, about a factor of three "
    "apart and the same for all nets, were set before any was trained; the best of them is chosen on the test text, "
    "for all alike.",
    "The net: attention and two layers with a ReLU by turns, learned positions, Glorot's weights, biases of zero; "
    "characters and positions, multiplied by the root of the width, start with a variance of one each. That is how "
    "transformers with post-norm were introduced; smaller weights in the branches are known to help these, and are not "
    "tried. The desk scale has six blocks of 64 features and batches of eight windows of 64 characters, so that batch "
    "norm has 512 values for a statistic. All arms with a seed start from the same weights and see the same windows.",
    "Batch norm takes a feature's statistics over all examples and positions. In training these are of later "
    "characters, too, so that a little of what is to be predicted leaks through them; in evaluation, with stored "
    f'statistics, nothing does. "Population statistics" are those of {POPULATION} training batches instead of moving '
    "averages: what is left of the distance with them was not lost to moving averages.",
    "The first characters of a window are predicted from little, by all nets alike. At the full scale the package's "
    "text is short for the net: give a longer one by --data.",
    "The rules were written before any of these nets had been trained, but for the dozen steps of the quick scale.",
)


class CharacterTransformer(Experiment):
    """One transformer, its norms of four kinds before the branches, and of one kind after them."""

    name = "sequence"
    claim = (
        "In a transformer, (a) norms before the branches train without a warm-up at rates at which norms after them do "
        "not; (b) RMSNorm and ScaleNorm do as well as layer norm; (c) batch norm does worse."
    )
    source = "Xiong et al. 2020; Zhang & Sennrich 2019; Nguyen & Salazar 2019; Shen et al. 2020"
    data = "moby-mini"
    takes = "text"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every norm before the branches, and layer norm after them, at every rate."""
        return [
            Arm(f"{kind}-{rate:g}", SIZES[scale] | {"placement": placement, "norm": norm, "rate": rate})
            for kind, (placement, norm) in KINDS.items()
            for rate in RATES[scale]
        ]

    def training(self, trial: Trial) -> Training:
        """Adam with a rate that falls linearly."""
        settings, every = trial.arm.settings, EVERY[trial.scale]
        rate, steps = settings["rate"], settings["steps"]
        task = Prediction(data.load_text(trial.data), settings["length"], settings["test"])
        model = net(settings, task.alphabet, trial.seed)
        batches = partial(task.batches, settings["batch"], trial.seed)
        seen = [x for x, _ in islice(batches(0), POPULATION)] if settings["norm"] == BATCH else []
        return Training(
            model,
            torch.optim.Adam(model.parameters(), lr=rate, fused=True),
            batches,
            steps,
            lambda step: step > 0 and step % every == 0,
            partial(_measure, task=task, population=seen),
            loss,
            rate=lambda step: rate * (1 - step / steps),
            chance=task.chance,
        )

    def findings(self, run: Run) -> Findings:
        """Count the rates that train, and compare bits at the best of them."""
        rates = RATES[run.header["scale"]]
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        trained = {kind: trains(ended, kind, rates) for kind in KINDS}
        chosen = {kind: at_best_rate(ended, kind, rates) for kind in KINDS}
        pre, post = (trained[f"{placement}-{LAYER}"] for placement in (PRE, POST))
        lost = {norm: behind(chosen, norm) for norm in (RMS, SCALE, BATCH)}
        parts = [
            agreed([trains_at_more(len(pre[seed]), len(post[seed]), len(rates)) for seed in pre if seed in post]),
            agreed([does_as_well(of, lost[SCALE][seed]) for seed, of in lost[RMS].items() if seed in lost[SCALE]]),
            agreed([does_worse(of) for of in lost[BATCH].values()]),
        ]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [_rates_reason(trained, rates), _norms_reason(chosen, lost), _batch_reason(chosen, lost)],
            [_rates_table(ended, trained, rates), _table(chosen)],
            _figures(ended, chosen, rates),
            NOTES,
        )


EXPERIMENT = CharacterTransformer()


# ---- nets


def net(settings: Mapping[str, Any], alphabet: int, seed: int) -> nn.Module:
    """Return the net of an arm, whose weights depend on the seed alone."""
    sizes = {key: settings[key] for key in ("length", "width", "blocks", "heads")}
    return transformer(NORMS[settings["norm"]], settings["placement"], alphabet=alphabet, seed=seed, **sizes)


def _measure(model: nn.Module, task: Prediction, population: Sequence[Tensor]) -> dict[str, float]:
    """With the statistics that are stored, and with those of the population if there are batches for them."""
    found = task.measure(model) | {"unigram": task.unigram}
    if population:
        with untouched(model):
            nk.recalibrate(model, population, method="paper", inplace=True)
            found["population"] = task.measure(model)["bits"]
    return found


# ---- what the records say

BySeed = Mapping[int, TrialRecord]
Trained = Mapping[str, Mapping[int, Sequence[float]]]  # rates, by net and seed


def bits(trial: TrialRecord, key: str = "bits") -> float:
    """The fewest bits per character that a trial measured; infinite if it diverged."""
    return inf if has_diverged(trial) else min(trial.series(key)[1], default=inf)


def trains(run: Run, kind: str, rates: Sequence[float]) -> dict[int, list[float]]:
    """The rates at which a net trains, by seed; seeds that have not ended at all rates are left out."""
    found: dict[int, dict[float, bool]] = {}
    for rate in rates:
        for trial in run.of(f"{kind}-{rate:g}"):
            found.setdefault(trial.seed, {})[rate] = bits(trial) <= _level(run, trial)
    return {seed: [rate for rate in rates if of[rate]] for seed, of in found.items() if len(of) == len(rates)}


def _level(run: Run, trial: TrialRecord) -> float:
    """The bits of half as much as the best trial of the same seed has learnt."""
    best, unigram = min(bits(other) for other in run.trials if other.seed == trial.seed), last(trial, "unigram")
    return unigram - TRAINS * (unigram - best)


def trains_at_more(pre: int, post: int, rates: int) -> bool | None:
    """(a) Of the rates, more train with pre-norm; None if all do with both, or none."""
    return None if pre == post and pre in (0, rates) else pre > post


def at_best_rate(run: Run, kind: str, rates: Sequence[float]) -> BySeed:
    """The trials of a net at the rate with the lowest median, by seed."""
    by_rate = [run.of(f"{kind}-{rate:g}") for rate in rates]
    best = min(filter(None, by_rate), key=lambda trials: median(map(bits, trials)), default=[])
    return {trial.seed: trial for trial in best}


def behind(chosen: Mapping[str, BySeed], norm: str, key: str = "bits") -> dict[int, float]:
    """By how many bits a norm is behind layer norm, both before the branches, by seed."""
    mine, theirs = chosen[f"{PRE}-{norm}"], chosen[f"{PRE}-{LAYER}"]
    return {seed: bits(mine[seed], key) - bits(theirs[seed]) for seed in sorted({*mine} & {*theirs})}


def does_as_well(*lost: float) -> bool | None:
    """(b) All within the margin; None if one is not, but none is outside of twice the margin."""
    if all(of < MARGIN for of in lost):
        return True
    return False if any(of >= 2 * MARGIN for of in lost) else None


def does_worse(lost: float) -> bool | None:
    """(c) Behind by more than the margin; None if by less."""
    return True if lost > MARGIN else False if lost <= 0 else None


def _shown(values: Iterable[float], digits: int = 3) -> str:
    return with_range([value if isfinite(value) else None for value in values], digits)


def _rates_reason(trained: Trained, rates: Sequence[float]) -> str:
    counts = ", ".join(f"{kind} {with_range([len(of) for of in trained[kind].values()])}" for kind in KINDS)
    return f"(a) Of {len(rates)} rates so many train: {counts}."


def _norms_reason(chosen: Mapping[str, BySeed], lost: Mapping[str, Mapping[int, float]]) -> str:
    layer = _shown(map(bits, chosen[f"{PRE}-{LAYER}"].values()))
    distances = ", ".join(f"{norm} by {_shown(lost[norm].values())}" for norm in (RMS, SCALE))
    return f"(b) Layer norm ends with {layer} bits per character at its best rate. Behind it are {distances}."


def _batch_reason(chosen: Mapping[str, BySeed], lost: Mapping[str, Mapping[int, float]]) -> str:
    population = behind(chosen, BATCH, "population")
    return (
        f"(c) Batch norm is behind by {_shown(lost[BATCH].values())} bits, and by {_shown(population.values())} with "
        "population statistics."
    )


def _rates_table(run: Run, trained: Trained, rates: Sequence[float]) -> Table:
    rows = [
        [
            kind,
            *(_shown(map(bits, run.of(f"{kind}-{rate:g}"))) for rate in rates),
            with_range([len(of) for of in trained[kind].values()]),
        ]
        for kind in KINDS
    ]
    columns = ["net", *(f"bits at {rate:g}" for rate in rates), "rates that train"]
    note = "Bits per character of the test text: median (range) over seeds. Never: a trial that diverged."
    return Table("Bits per character by rate", columns, rows, note)


def _table(chosen: Mapping[str, BySeed]) -> Table:
    rows = []
    for kind, by_seed in chosen.items():
        trials = [*by_seed.values()]
        rows.append(
            [
                kind,
                ", ".join(sorted({f"{trial.header['settings']['rate']:g}" for trial in trials})),
                _shown(map(bits, trials)),
                _shown(bits(trial, "population") for trial in trials if trial.series("population")[1]),
                _shown(last(trial, "loss") / log(2) for trial in trials),
                _shown((100 * last(trial) for trial in trials), 1),
                _shown(last(trial, "unigram") for trial in trials),
            ]
        )
    columns = ["net", "best rate", "bits", "population", "training", "accuracy", "frequencies"]
    note = (
        "Bits per character of the test text; with population statistics; of the training text in the last steps. "
        "Accuracy: the share of test characters that were held the likeliest, in %. Frequencies: the bits of a code by "
        "these alone. Median (range) over seeds. Never: a trial that diverged."
    )
    return Table("At the best rate", columns, rows, note)


def _figures(run: Run, chosen: Mapping[str, BySeed], rates: Sequence[float]) -> list[Figure]:
    note, label = "Median and range over seeds, without trials that diverged.", "bits per character"

    def ends(kind: str, rate: float) -> list[float]:
        return [*filter(isfinite, map(bits, run.of(f"{kind}-{rate:g}")))]

    over_steps = [curve_over_seeds(kind, [*of.values()], "bits") for kind, of in chosen.items() if of]
    by_rate = [curve_of_medians(kind, [(rate, ends(kind, rate)) for rate in rates]) for kind in KINDS]
    return [
        Figure("Bits per character at the best rate", "steps", label, over_steps, "Median and range over seeds."),
        Figure("Bits per character by rate", "rate", label, by_rate, note, log_x=True),
    ]
