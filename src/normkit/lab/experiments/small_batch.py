"""Error against the size of the batch, by norm (Wu & He 2018; Ioffe 2017; Yan et al. 2020)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.probed import agreed, has_diverged, paired
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_of_medians, is_complete, last, verdict, with_range
from normkit.snapshot import untouched

BATCH, GROUP = "batch", "group"
MOVED = ("renorm", "moving")  # statistics of more than the batch
ALONE = ("layer", "instance", "frozen")  # an example's own, or none
NORMS = (BATCH, GROUP, *MOVED, *ALONE)
GHOST = "ghost"  # a large batch in small chunks
SIZES = {"quick": (8, 2), "desk": (32, 8, 2), "full": (32, 16, 8, 4, 2)}
EXAMPLES = {"quick": 320, "desk": 8_000, "full": 800_000}
MEASUREMENTS = {"quick": 2, "desk": 8, "full": 40}  # in all of a training
RATE, MOMENTUM = 0.1, 0.9  # with the largest batch
POPULATION = 8  # batches of the largest size
MARGIN = 0.02  # of error, which is more than two standard errors on 2,000 images
NOTES = (
    "The rise of a norm's error is the test error at the end with the smallest batch less that with the largest, seed "
    f"by seed; a trial that diverged errs always. (a) holds in a seed if BN's error rises by more than "
    f"{100 * MARGIN:g} points, and fails if it does not rise. (b) holds if group norm's error rises by less than "
    f"{100 * MARGIN:g} points and by less than half of BN's, and fails if it rises by as much as BN's. (c) holds if, "
    "with the smallest batch, group norm errs less than BN, else it fails. Supported: all parts hold in every seed. "
    "Contradicted: one part fails in every seed.",
    "Every arm sees the same number of examples, so that small batches take more steps, at rates that fall linearly to "
    f"0 from {RATE:g} times the batch over the largest; SGD with momentum {MOMENTUM:g}. That is Wu and He's rule; "
    "nothing is tuned for any norm.",
    "The net: eight layers in residual blocks of 8 to 32 channels, on maps of 14, 7 and 4 pixels a side, so that even "
    "two images give the last statistics 32 values: less is lost than in a detector's head, and more than in the maps "
    "of ImageNet's nets. All arms with a seed start from the same weights.",
    '"population" is BN evaluated with the statistics of eight large batches instead of moving averages: what is left '
    "of its rise there was lost in training, the rest in evaluation.",
    '"ghost" trains on batches of the largest size whose statistics are of chunks, as several devices without '
    "synchronization do; synchronized, they would be BN with the largest batch, number for number.",
    '"moving" averages over as many batches as make a large one, with centred weights, as its authors do. "frozen" '
    "has the statistics of the first weights, on eight large batches, and only learns gamma and beta.",
    "How long nets train decides. With four times as many examples as at the desk scale, and one seed, BN errs 13.2% "
    "with batches of 32 and 14.1% with 2, group norm 16.3% and 13.9%; with 16 times as many 11.8% and 11.4%, and 13.0% "
    "and 12.7%. On images this small, BN's rise ends with more training, and group norm becomes flat.",
    "The rules were written before any of these nets had been trained. The desk scale had "
    "16,000 examples and four sizes until a run of it turned out to take over 20 minutes; of what that run had found, "
    "only the accuracies of two trials with frozen statistics had been seen, which are no part of the verdict.",
)


class SmallBatch(Experiment):
    """One net with eight kinds of norms, in batches from large to small."""

    name = "small-batch"
    claim = (
        "(a) With Batch Normalization the error rises as the batch gets small; (b) with group normalization it does "
        "not, (c) so that small batches are better off with it."
    )
    source = "Wu & He 2018, figure 1 and table 2"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """Each norm with each batch; the ghost with the largest, in chunks."""
        most = SIZES[scale][0]
        kinds = [(norm, size, size) for norm in NORMS for size in SIZES[scale]]
        kinds += [(GHOST, most, size) for size in SIZES[scale][1:]]
        return [
            Arm(
                f"{norm}-{of}",
                {"norm": norm, "batch": batch, "of": of, "largest": most, "examples": EXAMPLES[scale]}
                | {"steps": EXAMPLES[scale] // batch, "rate": RATE * batch / most, "momentum": MOMENTUM},
            )
            for norm, batch, of in kinds
        ]

    def training(self, trial: Trial) -> Training:
        """SGD for a number of examples, with a rate that falls linearly."""
        settings, images = trial.arm.settings, Classification(data.load(trial.data))
        large = [x for x, _ in islice(images.batches(settings["largest"], trial.seed, 0), POPULATION)]
        model = net(settings, images, trial.seed, large)
        every = settings["steps"] // MEASUREMENTS[trial.scale]
        training = images.falling_training(trial, model, lambda step: step % every == 0)
        if settings["norm"] == BATCH:
            training.measure = partial(_accuracies, images=images, batches=large)
        return training

    def findings(self, run: Run) -> Findings:
        """Compare the rises of the error."""
        sizes = SIZES[run.header["scale"]]
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        rises = {norm: rises_of(ended, norm, sizes) for norm in (*NORMS, GHOST)}
        seeds = sorted(set(rises[BATCH]) & set(rises[GROUP]))
        parts = [
            agreed([batch_norm_rises(rises[BATCH][seed]) for seed in seeds]),
            agreed([group_norm_does_not(rises[GROUP][seed], rises[BATCH][seed]) for seed in seeds]),
            agreed([error(mine) < error(theirs) for mine, theirs in _smallest(ended, sizes)]),
        ]
        return Findings(
            self.claim,
            self.source,
            verdict(parts, is_complete(run, self.arms(run.header["scale"])), contradicted_by="any"),
            [
                _rise_reason(rises, sizes),
                _smallest_reason(ended, sizes),
                _population_reason(ended, sizes),
                _chunk_reason(rises, sizes),
            ],
            [_table(ended, rises, sizes)],
            _figures(ended, sizes),
            NOTES,
        )


EXPERIMENT = SmallBatch()


# ---- nets


class Centred(nn.Module):
    """Weights less their mean over what each output is computed from: instead of centring the output."""

    def forward(self, weight: Tensor) -> Tensor:
        """Centre."""
        return weight - weight.mean(dim=tuple(range(1, weight.ndim)), keepdim=True)


def net(settings: Mapping[str, Any], images: Classification, seed: int, batches: Sequence[Tensor]) -> nn.Module:
    """Return the net of an arm, whose weights depend on the seed alone; `batches` are for frozen statistics."""
    model = images.small_resnet(_norm(settings), seed)
    if settings["norm"] == "moving":
        for module in list(model.modules()):
            if isinstance(module, nn.Conv2d):
                parametrize.register_parametrization(module, "weight", Centred())
    if settings["norm"] == "frozen":
        nk.recalibrate(model, batches, inplace=True)
        nk.freeze(model, affine=False, inplace=True)
    return model


def _norm(settings: Mapping[str, Any]) -> models.Norm:
    of, largest = settings["of"], settings["largest"]
    norms: dict[str, Callable[..., nn.Module]] = {
        BATCH: nk.BatchNorm2d,
        "frozen": nk.BatchNorm2d,  # at first
        GROUP: partial(nk.GroupNorm, 4),
        "layer": partial(nk.GroupNorm, 1),
        "instance": partial(nk.InstanceNorm2d, affine=True),
        "renorm": partial(nk.BatchRenorm2d, schedule=nk.layers.renorm_schedule(settings["steps"])),
        "moving": partial(nk.MovingBatchNorm2d, buffer_size=largest // of),
        GHOST: partial(nk.GhostBatchNorm2d, chunk_size=of),
    }
    return norms[settings["norm"]]


def _accuracies(model: nn.Module, images: Classification, batches: Sequence[Tensor]) -> dict[str, float]:
    """With the statistics that are stored, and with those of the population."""
    stored = images.accuracy(model)
    with untouched(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nk.NormkitWarning)  # a moving average of batches has no population
            nk.recalibrate(model, batches, method="paper", inplace=True)
        return {"accuracy": stored, "population": images.accuracy(model)}


# ---- what the records say


def error(trial: TrialRecord, key: str = "accuracy") -> float:
    """The test error at the end, 1 if the trial diverged."""
    return 1.0 if has_diverged(trial) else 1.0 - last(trial, key)


def rises_of(run: Run, norm: str, sizes: Sequence[int], key: str = "accuracy") -> dict[int, float]:
    """By how much a norm's error is larger with the smallest batch than with the largest, by seed."""
    large = BATCH if norm == GHOST else norm  # a single chunk
    pairs = paired(run, f"{norm}-{sizes[-1]}", f"{large}-{sizes[0]}")
    return {small.seed: error(small, key) - error(large, key) for small, large in pairs}


def batch_norm_rises(rise: float) -> bool | None:
    """(a) By more than the margin; None if by less."""
    return True if rise > MARGIN else False if rise <= 0 else None


def group_norm_does_not(rise: float, batch_norms: float) -> bool | None:
    """(b) Neither by the margin nor by half as much as BN's; None if by more than that, and by less than BN's."""
    if rise < MARGIN and rise < batch_norms / 2:
        return True
    return False if rise >= batch_norms else None


def _smallest(run: Run, sizes: Sequence[int]) -> list[tuple[TrialRecord, TrialRecord]]:
    return paired(run, f"{GROUP}-{sizes[-1]}", f"{BATCH}-{sizes[-1]}")


def _percent(values: Iterable[float]) -> str:
    return with_range([100 * value for value in values], 1)


def _rise_reason(rises: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> str:
    found = ", ".join(f"{norm} {_percent(rises[norm].values())}" for norm in (BATCH, GROUP))
    return f"(a, b) From batches of {sizes[0]} to batches of {sizes[-1]} the error rises by these points: {found}."


def _smallest_reason(run: Run, sizes: Sequence[int]) -> str:
    pairs = _smallest(run, sizes)
    fewer = sum(error(mine) < error(theirs) for mine, theirs in pairs)
    ends = [_percent(error(pair[i]) for pair in pairs) for i in (0, 1)]
    return (
        f"(c) With batches of {sizes[-1]} the test error is {ends[0]}% with group norm and {ends[1]}% with BN: less in "
        f"{fewer} of {len(pairs)} seeds."
    )


def _population_reason(run: Run, sizes: Sequence[int]) -> str:
    rises = rises_of(run, BATCH, sizes, "population").values()
    return f"With population statistics in evaluation BN's error rises by {_percent(rises)} points."


def _chunk_reason(rises: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> str:
    rise = _percent(rises[GHOST].values())
    return (
        f"Small batches take more steps, by which all norms gain. In the steps of batches of {sizes[0]}, "
        f"with statistics of {sizes[-1]} (ghost), BN's error rises by {rise} points; group norm has no statistics of "
        "batches."
    )


def _table(run: Run, rises: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> Table:
    rows = []
    for norm in (*NORMS, GHOST):
        of_sizes = [run.of(f"{norm}-{size}") for size in sizes]
        rows.append([norm, *(_percent(map(error, of)) for of in of_sizes), _percent(rises[norm].values())])
        if norm == BATCH:
            cells = [_percent(error(trial, "population") for trial in of) for of in of_sizes]
            rise = _percent(rises_of(run, BATCH, sizes, "population").values())
            rows.append(["batch, population statistics", *cells, rise])
    note = "Test error at the end in %, and by how many points it rises: median (range) over seeds. Ghost: by chunk."
    return Table("Test error by batch", ["norm", *(f"batch of {size}" for size in sizes), "rise"], rows, note)


def _figures(run: Run, sizes: Sequence[int]) -> list[Figure]:
    note, most = "At the end: median and range over seeds.", sizes[0]

    def figure(title: str, x: str, note: str, arms: Mapping[str, Sequence[str]]) -> Figure:
        """Curves through arms, in the order of sizes."""
        errors = {name: [[*map(error, run.of(arm))] for arm in of] for name, of in arms.items()}
        curves = [curve_of_medians(name, [*zip(sizes, of, strict=True)][::-1]) for name, of in errors.items()]
        return Figure(title, x, "error", curves, note, log_x=True)

    def by_batch(title: str, norms: Sequence[str]) -> Figure:
        arms = {norm: [f"{norm}-{size}" for size in sizes] for norm in norms}
        return figure(f"Test error by batch, {title}", "batch", note, arms)

    alike = f"{note} All in batches of {most}, and in as many steps: group norm has no statistics of batches."
    chunked = [f"{BATCH}-{most}", *(f"{GHOST}-{size}" for size in sizes[1:])]
    same_steps = {BATCH: chunked, GROUP: [f"{GROUP}-{most}"] * len(sizes)}
    return [
        figure("Test error by how many examples share statistics", "examples", alike, same_steps),
        by_batch("of batch and group norm", (BATCH, GROUP, *MOVED)),
        by_batch("of the others", ALONE),
    ]
