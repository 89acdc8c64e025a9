"""Findings as an experiment might have them: arms, seeds, ranges, a divergence, published curves, awkward names."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from normkit.figures.figure import Curve, Figure, Pictures, Table
from normkit.figures.pictures import row_of
from normkit.lab.certainty import Certainty
from normkit.lab.findings import Findings
from normkit.lab.record import Run, TrialRecord
from normkit.lab.report import Section

HOSTILE = "</script><script>throw Error('out')</script><b>&amp; %{x} [red]"
LONG = "BN-Inception with an initial learning rate multiplied by thirty, dropout removed and L2 reduced fivefold"
DIVERGING = "Inception ×5, σ"  # noqa: RUF001, as names may be
STEPS = [float(step) for step in range(0, 50_001, 1000)]

ENVIRONMENT = {
    "normkit": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "platform": "Linux-6.18-x86_64-with-glibc2.36",
    "cpu": "Example(R) Processor 3000",
    "cores": 8,
    "kernels": {"backend": "native", "instruction set": "avx512"},
    "allocator": {},
    "huge_pages": "madvise",
}


def rise(best, speed, wiggle=0.0):
    """An accuracy on its way up."""
    return [best * (1 - math.exp(-step / speed)) + wiggle * math.sin(step / 1700) for step in STEPS]


def measured(name, best, speed, width=0.012):
    y = rise(best, speed, 0.004)
    return Curve(name, STEPS, y, [v - width for v in y], [v + width * 0.7 for v in y])


def diverging():
    y = [v if step < 9000 else math.nan for v, step in zip(rise(0.3, 9000), STEPS, strict=True)]
    low = [None if math.isnan(v) else v - 0.05 for v in y]
    high = [None if math.isnan(v) else v + 0.05 for v in y]
    return Curve(DIVERGING, STEPS, y, low, high)


def accuracy_figure():
    curves = [
        measured("Inception", 0.722, 14_000),
        measured("BN-Baseline", 0.727, 7000),
        measured("BN-x5", 0.73, 3600),
        measured(LONG, 0.748, 5200),
        diverging(),
        Curve("BN-Baseline", STEPS[::5], rise(0.72, 6000)[::5], is_published=True),
    ]
    return Figure(
        "Validation accuracy over training",
        "steps",
        "accuracy",
        curves,
        "Means over 3 seeds; bands: lowest to highest.",
    )


def loss_figure():
    curves = [
        Curve("BN-x5", [1.0, 10.0, 100.0], [2.3, 0.9, 1.25e-5], [2.2, 0.8, 1e-5], [2.4, 1.0, 2e-5]),
        Curve("Inception", [1.0, 10.0], [2.3, 2.1]),
        Curve("single point", [50.0], [1.5]),
        Curve("never finite", [1.0, 2.0], [math.inf, math.nan]),
    ]
    return Figure("Training loss", "epochs", "cross entropy, nats", curves)


def main_table():
    rows = [
        ["Inception", 31_000_000, 0.7221834, None],
        ["BN-Baseline", 13_300_000, 0.727, 2.3308],
        ["BN-x5", 2_100_000, 0.73, 14.76],
        [LONG, 2_700_000, 0.748, 11.48],
        [DIVERGING, None, math.nan, None],
    ]
    columns = ["Model", "Steps to 72.2 %", "Best accuracy", "Times faster"]
    return Table("Steps to the accuracy of Inception", columns, rows, "\N{EN DASH}: the accuracy was never reached.")


def pictures(name, title="Samples"):
    pixels = torch.arange(192, dtype=torch.uint8).view(4, 1, 6, 8)
    return Pictures(title, [(name, row_of(pixels)), ("negative", row_of(255 - pixels))], "Four of each.")


def paper_findings():
    return Findings(
        claim="With batch normalization a network reaches the same accuracy in 14 times fewer training steps.",
        source="Ioffe and Szegedy 2015, section 4.2.2, figure 3",
        outcome="supported",
        reasons=[
            "BN-x5 reached 0.722 after 2,100,000 steps, Inception after 31,000,000: 14.8 times as many.",
            "All of 3 seeds agree: the smallest factor is 13.9, the largest 15.1.",
        ],
        tables=[main_table()],
        figures=[accuracy_figure(), loss_figure()],
        notes=["Images of 28 by 28 pixels stand for ImageNet.", "Rates were chosen for each arm on its own."],
        pictures=[pictures("BN-x5")],
    )


def hostile_findings():
    figure = Figure(HOSTILE, HOSTILE, HOSTILE, [Curve(HOSTILE, [0.0, 1.0], [0.5, -0.5])], HOSTILE)
    table = Table(HOSTILE, [HOSTILE, "value"], [[HOSTILE, 1e-7], ["two", 12_345.678]], HOSTILE)
    return Findings(HOSTILE, HOSTILE, "unclear", [HOSTILE], [table], [figure], [HOSTILE], [pictures(HOSTILE, HOSTILE)])


def trial(arm, seed, end, settings):
    header = {
        "experiment": "inception",
        "arm": arm,
        "seed": seed,
        "scale": "desk",
        "data": "fashion-mini",
        "settings": settings,
        "steps": 50_000,
        "parameters": 13_564_322,
        "environment": ENVIRONMENT,
        "threads": 1,
        "commit": "5bbb3a6d0f6f4f6b8e1c9a7d2b3c4d5e6f708192",
        "started": f"2026-05-0{seed + 1}T09:30:00+00:00",
    }
    lines = [{"step": 1000, "seconds": 41.5, "loss": 1.2, "accuracy": 0.4}]
    return TrialRecord(Path(f"records/inception.{arm}.{seed}.jsonl"), header, lines, end)


def paper_run():
    done = {"status": "done", "step": 50_000, "seconds": 2100.4, "why": None}
    diverged = {"status": "diverged", "step": 9000, "seconds": 377.0, "why": "the loss is nan at step 9000"}
    arms = {
        "Inception": {"norm": None, "learning_rate": 0.0015, "dropout": 0.4, "batch": 32},
        "BN-Baseline": {"norm": "BatchNorm2d", "learning_rate": 0.0015, "dropout": 0.4, "batch": 32},
        "BN-x5": {"norm": "BatchNorm2d", "learning_rate": 0.0075, "dropout": 0.0, "batch": 32},
        LONG: {"norm": "BatchNorm2d", "learning_rate": 0.045, "dropout": 0.0, "batch": 32},
        DIVERGING: {"norm": None, "learning_rate": 0.0075, "dropout": 0.4, "batch": 32, "why": HOSTILE},
    }
    ends = {DIVERGING: diverged}
    trials = [
        trial(arm, seed, None if (arm, seed) == (LONG, 2) else ends.get(arm, done), settings)
        for seed in range(3)
        for arm, settings in arms.items()
    ]
    return Run(Path("runs/inception"), trials)


def hostile_run():
    return Run(Path("runs/hostile"), [trial(HOSTILE, 0, None, {HOSTILE: [HOSTILE, math.nan]})])


def paper_section():
    command = "normkit lab run inception --scale desk --seeds 3 --data fashion-mini --out runs/inception"
    return Section(paper_run(), paper_findings(), "Fewer steps to the same accuracy", command)


def hostile_section():
    return Section(hostile_run(), hostile_findings(), HOSTILE, HOSTILE)


def sections():
    return [paper_section(), hostile_section()]


def story_sections():
    """As the experiments of a story: one that is complete, one that is not."""
    done, hostile = Certainty(("supported", "supported", "unclear"), 15, 15), Certainty(("unclear",), 0, 2)
    return [
        replace(paper_section(), title="inception", certainty=done),
        replace(hostile_section(), title="sigmoid-mlp", certainty=hostile),
    ]
