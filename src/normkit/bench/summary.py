"""The figures that the cases add up to: geometric means, and the worst case beside each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from normkit.bench.case import EAGER, OURS, Result
from normkit.bench.layer_case import is_compiled

LARGE_BYTES = 8_000_000  # beyond the caches of most cores: from here on memory decides

Number = Callable[[Result], float | None]  # None where the contestant did not run


@dataclass(frozen=True)
class SummaryFigure:
    """A number that some of the cases have, and for which of them."""

    name: str
    selects: Callable[[Result], bool]
    ours: Number
    eager: Number | None = None  # torch's own number, where it is not 1 by definition
    better: Literal["more", "less"] = "more"


@dataclass(frozen=True)
class SummaryRow:
    """A figure with one number of threads: the geometric mean over its cases, and the worst of them."""

    figure: str
    threads: int
    cases: int
    value: float
    worst: float
    worst_case: str
    eager: float
    better: Literal["more", "less"]


def over_eager(result: Result) -> float | None:
    """Torch eager's time over ours."""
    return result.ratios[EAGER].median if EAGER in result.ratios else None


def over_compile(result: Result) -> float | None:
    """The time of the better of torch.compile's contestants, over ours."""
    return min((spread.median for name, spread in result.ratios.items() if is_compiled(name)), default=None)


def multiple_of_limit(contestant: str) -> Number:
    """A contestant's time over the memory limit's."""
    return lambda result: result.multiples[contestant].median if contestant in result.multiples else None


def saved_over_input(contestant: str) -> Number:
    """Bytes that a contestant keeps for its backward, over those of the input."""
    return lambda r: r.bytes[contestant] / r.facts["input_bytes"] if contestant in r.bytes else None


def peak_over_eager(result: Result) -> float | None:
    """The most memory that our step takes, over that of torch eager's."""
    return result.bytes[OURS] / result.bytes[EAGER] if {OURS, EAGER} <= result.bytes.keys() else None


def _in(group: str, **facts: object) -> Callable[[Result], bool]:
    return lambda r: r.group == group and all(r.facts.get(name) == value for name, value in facts.items())


def _large(selects: Callable[[Result], bool]) -> Callable[[Result], bool]:
    return lambda r: selects(r) and r.facts["input_bytes"] >= LARGE_BYTES


def _family(*kinds: tuple[str, str]) -> Callable[[Result], bool]:
    """Cases of the family, by layer and layout."""
    return lambda r: r.group == "family" and (r.facts["title"], r.facts["layout"]) in kinds


_HARD_FOR_TORCH = _family(
    ("GroupNorm(32)", "channels_last"),
    ("GroupNorm(32)", "NC"),
    ("InstanceNorm2d", "NCHW"),
    ("InstanceNorm2d", "channels_last"),
    ("RMSNorm", "NC"),
    ("LayerNorm", "channels_last"),
)
_EASY_FOR_TORCH = _family(("GroupNorm(32)", "NCHW"), ("LayerNorm", "NC"))
_OURS_LIMIT, _EAGER_LIMIT = multiple_of_limit(OURS), multiple_of_limit(EAGER)

FIGURES = (
    SummaryFigure("BN + ReLU training, NCHW fp32, over eager", _in("bn", layout="NCHW", dtype="float32"), over_eager),
    SummaryFigure(
        "BN + ReLU training, channels_last fp32, over eager",
        _in("bn", layout="channels_last", dtype="float32"),
        over_eager,
    ),
    SummaryFigure("BN + ReLU training, all cases, over eager", _in("bn"), over_eager),
    SummaryFigure("BN + ReLU training, all cases, over the better torch.compile", _in("bn"), over_compile),
    SummaryFigure("BN + ReLU evaluation, over eager", _in("bn-eval"), over_eager),
    SummaryFigure(
        "evaluation, multiples of the limit, from 8 MB on", _large(_in("bn-eval")), _OURS_LIMIT, _EAGER_LIMIT, "less"
    ),
    SummaryFigure(
        "training, multiples of the limit, NCHW, from 8 MB on",
        _large(_in("bn", layout="NCHW")),
        _OURS_LIMIT,
        _EAGER_LIMIT,
        "less",
    ),
    SummaryFigure(
        "GroupNorm(32) channels_last and 2-D, InstanceNorm, RMSNorm 2-D, LayerNorm channels_last, over eager",
        _HARD_FOR_TORCH,
        over_eager,
    ),
    SummaryFigure("GroupNorm(32) NCHW, LayerNorm 2-D, over eager", _EASY_FOR_TORCH, over_eager),
    SummaryFigure("LayerNorm over (C, H, W), NCHW, over eager", _family(("LayerNorm", "NCHW")), over_eager),
    SummaryFigure("a call on (32, 64), forward, over eager", _in("small", mode="forward"), over_eager),
    SummaryFigure("a call on (32, 64), forward + backward, over eager", _in("small", mode="training"), over_eager),
    SummaryFigure("shapes of networks, BN + ReLU training, over eager", _in("networks"), over_eager),
    SummaryFigure("shapes nobody tuned on, over eager", _in("untuned"), over_eager),
    SummaryFigure(
        "bytes saved for backward over input bytes, BN + ReLU",
        lambda r: r.group == "memory" and "input_bytes" in r.facts,
        saved_over_input(OURS),
        saved_over_input(EAGER),
        "less",
    ),
    SummaryFigure(
        "peak memory of an Inception-like training step, leaky ReLU, in place, over eager",
        lambda r: r.group == "memory" and r.name.startswith("peak"),
        peak_over_eager,
        better="less",
    ),
    SummaryFigure(
        "ResNet-18 training step, over eager", lambda r: (r.group, r.name) == ("models", "ResNet-18"), over_eager
    ),
    SummaryFigure(
        "Inception-like training step, over eager",
        lambda r: (r.group, r.name) == ("models", "Inception-like"),
        over_eager,
    ),
)


def summarize(results: Sequence[Result]) -> list[SummaryRow]:
    """Return every figure that has a case, for each number of threads."""
    rows = (
        _row(figure, threads, [r for r in results if r.threads == threads and figure.selects(r)])
        for figure in FIGURES
        for threads in sorted({r.threads for r in results})
    )
    return [row for row in rows if row is not None]


def _row(figure: SummaryFigure, threads: int, results: Iterable[Result]) -> SummaryRow | None:
    measured = [(value, r) for r in results if (value := figure.ours(r)) is not None]
    if not measured:
        return None
    values = [value for value, _ in measured]
    worst = min(values) if figure.better == "more" else max(values)
    eager = [1.0] if figure.eager is None else [value for _, r in measured if (value := figure.eager(r)) is not None]
    return SummaryRow(
        figure.name,
        threads,
        len(values),
        statistics.geometric_mean(values),
        worst,
        measured[values.index(worst)][1].name,
        statistics.geometric_mean(eager) if eager else float("nan"),
        figure.better,
    )
