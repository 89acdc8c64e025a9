"""A small DCGAN with and without Batch Normalization (Radford, Metz & Chintala 2015)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import ArgumentError
from normkit.figures.figure import Cell, Curve, Figure, Pictures, Table
from normkit.figures.pictures import row_of
from normkit.lab import data, models
from normkit.lab.adversarial import Alternation, Gan
from normkit.lab.data.randomness import generator
from normkit.lab.data.transforms import from_signed_range, to_signed_range
from normkit.lab.data.types import Images
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import agreed, has_diverged, settled_accuracy
from normkit.lab.record import Run, TrialRecord
from normkit.lab.sample_quality import Judge, judge_of
from normkit.lab.summaries import curve_over_seeds, is_complete, last, verdict, with_range


class Kind(NamedTuple):
    """Which nets have BN, how all weights start, and whether real and generated images are in one batch."""

    generator: bool = True
    discriminator: bool = True
    init: models.InitName = "gaussian"
    mixed: bool = False


BOTH, NONE, HE = "both", "none", "none-he"
KINDS = {
    BOTH: Kind(),
    NONE: Kind(False, False),
    HE: Kind(False, False, init="he"),
    "generator": Kind(discriminator=False),
    "discriminator": Kind(generator=False),
    "both-mixed": Kind(mixed=True),
}
INIT_SCALES = {"gaussian": 0.02, "he": 1.0}
RATES = (0.0002, 0.001)  # the paper's, and Adam's own, which the paper found too high
BETAS = (0.5, 0.999)
SIZES = {
    "quick": {"batch": 16, "width": 4, "latent": 16, "steps": 8},
    "desk": {"batch": 64, "width": 16, "latent": 64, "steps": 2000},
    "full": {"batch": 128, "width": 64, "latent": 100, "steps": 12_000},
}
MEASUREMENTS = {"quick": 2, "desk": 8, "full": 24}  # in all of a training
JUDGES = {"quick": (10, 200), "desk": (400, 2000), "full": (2000, 5000)}  # steps of training, and images compared
SHOWN = 16  # samples in a record's picture
CLOSER = 0.8  # times the distance of nets without BN
REAL, NOISE = "training images", "noise"
NOTES = (
    "The distance is the squared Fréchet distance of samples to as many test images, with the formula of FID, between "
    "normal distributions of the features of a small classifier of the same data; the spread is the variance of "
    "samples' features over that of test images of one class. Both are the medians of the last three measured. A "
    "generator has collapsed if its spread is below 1: to the classifier, its samples are together more alike than "
    "images of one class. One that diverged has collapsed, at an infinite distance.",
    f"(a) holds in a seed if the distance with BN in both nets is less than {CLOSER:g} times that without, and fails "
    "if it is not less at all. Each is taken at the rate with the lower median, chosen on the test images for all "
    "alike; nets without BN may also start from He's weights (none-he). (b) holds in a seed if generators collapse at "
    "fewer of the two rates with BN in both nets than without it, from the same weights, else it fails: also if no "
    "generator collapses. Supported: both hold in every seed. Contradicted: one fails in every seed.",
    "As in the paper: weights from N(0, 0.02), Adam with a beta1 of 0.5, at a rate of 0.0002 (and one of 0.001, as "
    "trainings are short), latent vectors uniform between -1 and 1. A step is one of the discriminator and one of the "
    "generator on the same generated images. To the discriminator real and generated images are batches with "
    "statistics of their own, as in the paper's code; in both-mixed its steps are on one batch of both.",
    "Samples are drawn with the generator's stored statistics (moving averages); the table has the distance with those "
    "of batches as large as in training, too. The discriminator's stored statistics are not used.",
    "At 28x28 the generator has three layers, at 32x32 four; the paper speaks of deep ones, and has five. The "
    "classifier, a residual net of eight layers with BN, has learnt from the training images and is the same for all "
    "trials.",
    "The rule was written before any of these nets had been trained; the measures had been tried on the data alone.",
)


class DcGan(Experiment):
    """One pair of nets, with BN in both, in one of them and in none, at two rates."""

    name = "gan"
    claim = (
        "(a) With Batch Normalization in both nets, a DCGAN's samples come closer to the data than without it; (b) "
        "without it the generator collapses to samples that are nearly alike, at rates at which it does not with it."
    )
    source = "Radford, Metz & Chintala 2015, section 3"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Every kind at two rates."""
        return [
            Arm(arm_name(kind, rate), {"kind": kind, **of._asdict(), "rate": rate, **SIZES[scale]})
            for kind, of in KINDS.items()
            for rate in RATES
        ]

    def training(self, trial: Trial) -> Training:
        """Adam at a constant rate for both nets, in turns."""
        settings, images = trial.arm.settings, data.load(trial.data).train
        judge, batch = judge_of(trial.data, *JUDGES[trial.scale]), settings["batch"]
        every = settings["steps"] // MEASUREMENTS[trial.scale]
        gan = nets(settings, images, trial.seed)
        optimizer = torch.optim.Adam(gan.parameters(), lr=settings["rate"], betas=BETAS, fused=True)
        latent = gan.draw(judge.images, generator("samples", trial.seed, 0))
        return Training(
            gan,
            optimizer,
            lambda start: data.batches(images, batch, trial.seed, start, to_signed_range),
            settings["steps"],
            lambda step: step % every == 0,
            lambda _: measured(gan, judge, latent, batch),
            update=Alternation(gan, optimizer, settings["mixed"]),
        )

    def findings(self, run: Run) -> Findings:
        """Compare distances at the best rates, and count collapses at all of them."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        best, known = {kind: at_best_rate(ended, kind) for kind in KINDS}, references(run)
        normed, plain = best[BOTH], at_best_rate(ended, NONE, HE)
        closer = [is_closer(distance(normed[seed]), distance(plain[seed])) for seed in sorted({*normed} & {*plain})]
        mine, theirs = collapses(ended, BOTH), collapses(ended, NONE)
        fewer = [mine[seed] < theirs[seed] for seed in sorted({*mine} & {*theirs})]
        is_whole = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict([agreed(closer), agreed(fewer)], is_whole, contradicted_by="any"),
            [
                _distance_reason(normed, plain, closer, known),
                _collapse_reason(ended, fewer),
                _statistics_reason(normed),
            ],
            [_table(ended, best, known), _rates_table(ended)],
            _figures(best, known),
            NOTES,
            _pictures(best),
        )


EXPERIMENT = DcGan()


def arm_name(kind: str, rate: float) -> str:
    """The name of an arm."""
    return f"{kind}-{rate:g}"


# ---- nets, and what is measured of them


def nets(settings: Mapping[str, Any], images: Images, seed: int) -> Gan:
    """Return the nets of an arm, whose weights depend on its `init` and on the seed alone."""
    channels, height, width = images.pixels.shape[1:]
    if height != width:
        raise ArgumentError(f"gan needs square images; those of this set are {height}x{width}. Choose another --data.")

    def pair(has_norm: bool) -> tuple[nn.Module, nn.Module]:
        norm = nk.BatchNorm2d if has_norm else None
        return models.dcgan(norm, channels=channels, size=height, latent=settings["latent"], width=settings["width"])

    gan = Gan(pair(settings["generator"])[0], pair(settings["discriminator"])[1], settings["latent"])
    models.initialize_(gan, settings["init"], INIT_SCALES[settings["init"]], seed=seed)
    return gan.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def measured(gan: Gan, judge: Judge, latent: Tensor, batch: int) -> dict[str, Any]:
    """What the judge says of samples with stored statistics and, where there are some, with batch statistics."""

    def samples() -> Tensor:
        return torch.cat([from_signed_range(gan.generator(some)) for some in latent.split(batch)])

    pixels = samples()
    found = {**judge.of(pixels), "judge": judge.accuracy, "references": {REAL: judge.real, NOISE: judge.noise}}
    if any(isinstance(layer, nk.BatchNorm2d) for layer in gan.generator.modules()):
        with nk.no_updates(gan.generator):
            gan.generator.train()
            found["batch_distance"] = judge.of(samples())["distance"]
            gan.generator.eval()
    return {**found, "samples": row_of(pixels[:SHOWN])}


# ---- what the records say

BySeed = Mapping[int, TrialRecord]
Known = Mapping[str, Mapping[str, float]]  # what the judge, which is the same for all trials, says of other images


def distance(trial: TrialRecord, key: str = "distance") -> float:
    """The distance of a trial's samples in the end, infinite if it diverged."""
    return math.inf if has_diverged(trial) else settled_accuracy(trial, key)


def has_collapsed(trial: TrialRecord) -> bool:
    """Whether a trial's samples are together more alike than images of one class, or it diverged."""
    return settled_accuracy(trial, "spread") < 1


def at_best_rate(run: Run, *kinds: str) -> BySeed:
    """The trials of some kinds at that kind and rate which has the lowest median distance."""
    arms = [run.of(arm_name(kind, rate)) for kind in kinds for rate in RATES]
    best = min(filter(None, arms), key=lambda trials: median(map(distance, trials)), default=[])
    return {trial.seed: trial for trial in best}


def collapses(run: Run, kind: str) -> dict[int, int]:
    """At how many rates the generators of a kind collapsed, by seed."""
    found: dict[int, int] = {}
    for trial in _at_all_rates(run, kind):
        found[trial.seed] = found.get(trial.seed, 0) + has_collapsed(trial)
    return found


def is_closer(mine: float, theirs: float) -> bool | None:
    """(a) Clearly less than the distance without BN; None if less than that, and not clearly."""
    return True if mine < CLOSER * theirs else None if mine < theirs else False


def references(run: Run) -> Known:
    """What the judge says of training images and of noise."""
    return next((trial.measured[-1]["references"] for trial in run.trials if trial.measured), {})


def _at_all_rates(run: Run, kind: str) -> list[TrialRecord]:
    return [trial for rate in RATES for trial in run.of(arm_name(kind, rate))]


def _distances(trials: Iterable[TrialRecord], key: str = "distance") -> str:
    found = [distance(trial, key) for trial in trials]
    return with_range([of if math.isfinite(of) else None for of in found], 2)


def _arm(found: BySeed) -> str:
    return next((trial.arm for trial in found.values()), "no trial yet")


def _distance_reason(normed: BySeed, plain: BySeed, closer: Sequence[bool | None], known: Known) -> str:
    beside = ", ".join(f"{name} {of['distance']:.2f}" for name, of in known.items())
    return (
        f"(a) The distance to the test images is {_distances(normed.values())} with BN in both nets ({_arm(normed)}) "
        f"and {_distances(plain.values())} without ({_arm(plain)}): less than {CLOSER:g} of it in {closer.count(True)} "
        f"of {len(closer)} seeds. For comparison: {beside or '-'}."
    )


def _collapse_reason(run: Run, fewer: Sequence[bool]) -> str:
    return (
        f"(b) Trials that collapsed, at all rates: {_collapsed(run, BOTH)} with BN in both nets, "
        f"{_collapsed(run, NONE)} without; at fewer rates in {sum(fewer)} of {len(fewer)} seeds."
    )


def _statistics_reason(best: BySeed) -> str:
    ends = [_distances(best.values(), key) for key in ("distance", "batch_distance")]
    return f"With BN in both nets the distance is {ends[0]} with stored statistics, {ends[1]} with those of batches."


def _collapsed(run: Run, kind: str) -> str:
    trials = _at_all_rates(run, kind)
    return f"{sum(map(has_collapsed, trials))} of {len(trials)}"


def _table(run: Run, best: Mapping[str, BySeed], known: Known) -> Table:
    shown = {"spread": 2, "classes": 1, "seen": 2, "coverage": 3, "density": 3}
    rows: list[list[Cell]] = []
    for kind, found in best.items():
        trials = found.values()
        own = [trial for trial in trials if trial.series("batch_distance")[1]]
        cells = [with_range([settled_accuracy(trial, key) for trial in trials], n) for key, n in shown.items()]
        rows.append(
            [kind, _arm(found), _distances(trials), _distances(own, "batch_distance"), *cells, _collapsed(run, kind)]
        )
    for name, of in known.items():
        rows.append([name, "", f"{of['distance']:.2f}", "", *(f"{of[key]:.{n}f}" for key, n in shown.items()), ""])
    columns = ["BN in", "best arm", "distance", "distance, batch statistics", "spread", "classes, by entropy"]
    columns += ["share of classes seen", "coverage", "density", "collapsed, at all rates"]
    accuracy = next((last(trial, "judge") for trial in run.trials), math.nan)
    note = (
        "Median (range) over seeds, each of the last three measured. Coverage and density: the share of balls around "
        "test images, up to their fifth neighbor, with a sample in them, and in how many balls a sample is, over five. "
        f"The classifier is right on {100 * accuracy:.1f}% of the test images."
    )
    return Table("Samples at the best rate", columns, rows, note)


def _rates_table(run: Run) -> Table:
    rows = [[kind, *(_distances(run.of(arm_name(kind, rate))) for rate in RATES)] for kind in KINDS]
    note = "Median (range) over seeds; never: it diverged."
    return Table("Distance by rate", ["BN in", *(f"rate {rate:g}" for rate in RATES)], rows, note)


def _figures(best: Mapping[str, BySeed], known: Known) -> list[Figure]:
    note = "At the best rate: median and range over seeds."

    def figure(title: str, key: str, log_y: bool = False) -> Figure:
        curves = [curve_over_seeds(kind, [*found.values()], key) for kind, found in best.items() if found]
        ends = [end(x for curve in curves for x in curve.x) for end in (min, max) if curves and curves[0].x]
        beside = [Curve(name, ends, [of[key]] * len(ends)) for name, of in known.items()]
        return Figure(title, "steps", key, curves + beside, note, log_y=log_y)

    return [
        figure("Distance of samples to test images", "distance", log_y=True),
        figure("Variance of samples over that of a class", "spread"),
        figure("Share of test images with a sample near by", "coverage"),
    ]


def _pictures(best: Mapping[str, BySeed]) -> list[Pictures]:
    first = [found[min(found)] for found in best.values() if found]
    rows = [(trial.arm, str(trial.measured[-1]["samples"])) for trial in first if trial.measured]
    note = "At the end of the first seed's training, at the best rate; with stored statistics."
    return [Pictures("Samples", rows, note)] if rows else []
