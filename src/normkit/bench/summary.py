"""The figures of a run: which number of which cases, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from normkit.activations import ACTIVATIONS
from normkit.bench.case import EAGER, OUR_BATCH_NORM, OURS, PUBLISHED, UNMASKED, Result
from normkit.bench.contestants import OF_MAPS, OTHERS, POINTWISE, RELATIVES
from normkit.bench.families.options import OPTIONS
from normkit.bench.figure import Number, SummaryFigure, SummaryRow, Wanted, row
from normkit.bench.layer_case import is_compiled

LARGE_BYTES = 8_000_000  # beyond the caches of most cores: from here on memory decides

Selects = Callable[[Result], bool]


def over(*contestants: str) -> Number:
    """The time of the first of these contestants that ran, over ours."""

    def number(result: Result) -> float | None:
        return next((result.ratios[name].median for name in contestants if name in result.ratios), None)

    return number


def behind(contestant: str) -> Number:
    """Our time over a contestant's: how far we fall behind it."""
    return lambda result: 1 / result.ratios[contestant].median if contestant in result.ratios else None


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


def _in(family: str | None = None, **facts: Any) -> Selects:
    """Cases of a family, or of any, with these facts."""

    def selects(result: Result) -> bool:
        is_member = family is None or result.family == family
        return is_member and all(result.facts.get(name) == value for name, value in facts.items())

    return selects


def _any(*parts: Selects) -> Selects:
    return lambda result: any(part(result) for part in parts)


def _large(selects: Selects) -> Selects:
    return lambda r: selects(r) and r.facts["input_bytes"] >= LARGE_BYTES


def _tuned(title: str, layout: str, **facts: Any) -> Selects:
    """Norms within an example in training, on the shapes that their loops were made for."""
    member = _in("within", title=title, layout=layout, mode="training", **facts)
    return lambda r: member(r) and "origin" not in r.facts


_MODES = ("training", "evaluation")
_OVER_EAGER, _OVER_TORCH = over(EAGER), over(EAGER, PUBLISHED)
_LIMIT = {"ours": multiple_of_limit(OURS), "eager": multiple_of_limit(EAGER)}


def _everyday() -> Iterator[SummaryFigure]:
    for mode in _MODES:
        name = f"everyday calls, {mode}, over torch or published code"
        yield SummaryFigure(name, _in(everyday=True, mode=mode), _OVER_TORCH, wanted=Wanted(1.0, "worst"))


def _batch() -> Iterator[SummaryFigure]:
    relu = {"title": "BN + ReLU", "mode": "training"}
    for name, facts, wanted in (
        ("NCHW fp32", {"layout": "NCHW", "dtype": "float32"}, 3.2),
        ("channels_last fp32", {"layout": "channels_last", "dtype": "float32"}, 2.0),
        ("bf16", {"dtype": "bfloat16"}, 2.0),
        ("2-D fp32", {"layout": "NC", "dtype": "float32"}, 1.25),
    ):
        selects = _in("batch", **relu, **facts)
        yield SummaryFigure(f"BN + ReLU training, {name}, over eager", selects, _OVER_EAGER, wanted=Wanted(wanted))
    yield SummaryFigure("BN + ReLU training, all cases, over eager", _in("batch", **relu), _OVER_EAGER)
    yield SummaryFigure(
        "BN + ReLU training, the kernels' twelve cases, over eager", _in("batch", **relu, kernel=True), _OVER_EAGER
    )
    yield SummaryFigure(
        "BN + ReLU training, the kernels' twelve cases, over the better torch.compile",
        _in("batch", **relu, kernel=True),
        over_compile,
    )
    for name, facts, wanted in (
        ("BN + add + ReLU training", {"title": "BN + add + ReLU"}, 2.2),
        ("BN training, no activation", {"title": "BN"}, 2.0),
        ("BN + ReLU evaluation", {"mode": "evaluation"}, 2.3),
    ):
        yield SummaryFigure(f"{name}, over eager", _in("batch", **facts), _OVER_EAGER, wanted=Wanted(wanted))
    for mode, wanted in (("training", 1.7), ("evaluation", 1.3)):
        yield SummaryFigure(
            f"BN + ReLU {mode}, multiples of the limit, NCHW, from 8 MB on",
            _large(_in("batch", title="BN + ReLU", layout="NCHW", mode=mode)),
            **_LIMIT,
            better="less",
            wanted=Wanted(wanted),
        )
    of_networks, untuned = _in("shapes", origin="networks"), _in(origin="untuned")
    yield SummaryFigure("shapes of networks, BN + ReLU training, over eager", of_networks, _OVER_EAGER)
    yield SummaryFigure("shapes nobody tuned on, over eager", untuned, _OVER_EAGER)


def _options_of_batch_norm() -> Iterator[SummaryFigure]:
    for activation in ACTIVATIONS:
        for mode in _MODES if activation != "relu" else ():
            selects = _in("activations", activation=activation, mode=mode)
            yield SummaryFigure(f"BN + {activation} {mode}, over eager", selects, _OVER_EAGER, wanted=Wanted(1.5))
    for mode in _MODES:
        masked = _in("masks", mode=mode)
        yield SummaryFigure(
            f"BN with a mask, {mode}: our time over that without",
            masked,
            behind(UNMASKED),
            better="less",
            wanted=Wanted(1.4),
        )
        yield SummaryFigure(f"BN with a mask, {mode}, over one by hand", masked, _OVER_EAGER, wanted=Wanted(1.0))
    for family, what in (("types", "other types"), ("strides", "slices and other strides")):
        for mode in _MODES:
            yield SummaryFigure(
                f"BN, {what}, {mode}, over eager", _in(family, mode=mode), _OVER_EAGER, wanted=Wanted(1.0)
            )


def _beside_batch_norm() -> Iterator[SummaryFigure]:
    for name in (*RELATIVES, "GhostBatchNorm1d"):
        for mode in _MODES:
            selects = _in("relatives", title=name, mode=mode)
            figure = f"{name} {mode}: our time over our BatchNorm's"
            yield SummaryFigure(figure, selects, behind(OUR_BATCH_NORM), better="less", wanted=Wanted(1.5))
    for mode in _MODES:
        figure = f"relatives of BatchNorm, {mode}, over published code"
        yield SummaryFigure(figure, _in("relatives", mode=mode), over(PUBLISHED), wanted=Wanted(1.0, "worst"))
    for name in OTHERS:
        for mode in _MODES:
            selects = _in("evo", title=name, mode=mode)
            yield SummaryFigure(f"{name} {mode}, over published code", selects, over(PUBLISHED), wanted=Wanted(2.0))


def _within() -> Iterator[SummaryFigure]:
    yield SummaryFigure(
        "GroupNorm(32) NCHW, over eager", _tuned("GroupNorm(32)", "NCHW"), _OVER_EAGER, wanted=Wanted(1.3)
    )
    for name in (*OF_MAPS, *POINTWISE):
        for mode in _MODES:
            selects = _in("within", title=name, mode=mode)
            figure = f"{name} {mode}, over published code"
            yield SummaryFigure(figure, selects, over(PUBLISHED), wanted=Wanted(1.0, "worst"))
    for dtype in ("float32", "bfloat16"):
        vectors = _in("within", vectors=True, dtype=dtype)
        yield SummaryFigure(
            f"LayerNorm (M, 384 to 1024) {dtype}, over eager", vectors, _OVER_EAGER, wanted=Wanted(1.15)
        )
    hard_for_torch = (
        _tuned("GroupNorm(32)", "channels_last"),
        _tuned("GroupNorm(32)", "NC"),
        _tuned("InstanceNorm2d", "NCHW"),
        _tuned("InstanceNorm2d", "channels_last"),
        _tuned("RMSNorm", "NC"),
        _tuned("LayerNorm", "channels_last"),
    )
    yield SummaryFigure(
        "GroupNorm(32) channels_last and 2-D, InstanceNorm, RMSNorm 2-D, LayerNorm channels_last, over eager",
        _any(*hard_for_torch),
        _OVER_EAGER,
        wanted=Wanted(3.0),
    )
    yield SummaryFigure("LayerNorm over (C, H, W), NCHW, over eager", _tuned("LayerNorm", "NCHW"), _OVER_EAGER)
    for mode, what in (("forward", "forward"), ("training", "forward + backward"), ("evaluation", "evaluation")):
        calls = _in("small", mode=mode)
        name = f"a call on (32, 64), each layer that torch has, {what}, over eager"
        yield SummaryFigure(name, calls, _OVER_EAGER, wanted=Wanted(1.0, "worst"))


def _whole_networks() -> Iterator[SummaryFigure]:
    yield SummaryFigure(
        "bytes saved for backward over input bytes, BN + ReLU",
        lambda r: r.family == "memory" and "input_bytes" in r.facts,
        saved_over_input(OURS),
        saved_over_input(EAGER),
        "less",
    )
    yield SummaryFigure(
        "peak memory of an Inception-like training step, leaky ReLU, in place, over eager",
        lambda r: r.family == "memory" and r.name.startswith("peak"),
        peak_over_eager,
        better="less",
    )
    for model in ("ResNet-18", "Inception-like"):
        selects = _named("models", model)
        yield SummaryFigure(f"{model} training step, over eager", selects, _OVER_EAGER)
    yield SummaryFigure(
        "converted networks, training step, over eager",
        _in("networks", mode="training"),
        _OVER_EAGER,
        wanted=Wanted(1.08),
    )
    for mode in _MODES:
        name = f"converted networks, each {mode} step, over eager"
        yield SummaryFigure(name, _in("networks", mode=mode), _OVER_EAGER, wanted=Wanted(0.98, "worst"))


def _named(family: str, name: str) -> Selects:
    return lambda r: (r.family, r.name) == (family, name)


def _each_option() -> Iterator[SummaryFigure]:
    """A row for each value of each option, over all cases that have it."""
    for option, values in OPTIONS.items():
        for value in values:
            shown = str(value).removeprefix("torch.")
            fact = {"layout": _LAYOUT_FACTS.get(value, value), "dtype": shown}.get(option, value)
            yield SummaryFigure(f"options: {option} {shown}, over eager", _in("options", **{option: fact}), _OVER_EAGER)


_LAYOUT_FACTS = {"contiguous": "NCHW"}

FIGURES: tuple[SummaryFigure, ...] = (
    *_everyday(),
    *_batch(),
    *_options_of_batch_norm(),
    *_beside_batch_norm(),
    *_within(),
    *_whole_networks(),
    *_each_option(),
)


def summarize(results: Sequence[Result]) -> list[SummaryRow]:
    """Return every figure that has a case, for each number of threads."""
    by_threads = {n: [r for r in results if r.threads == n] for n in sorted({r.threads for r in results})}
    rows = (row(figure, threads, found) for figure in FIGURES for threads, found in by_threads.items())
    return [found for found in rows if found is not None]
