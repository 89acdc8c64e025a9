import pytest

from normkit.bench.case import Result
from normkit.bench.cases import all_cases
from normkit.bench.figure import SummaryFigure, Wanted, row
from normkit.bench.layer_case import LayerCase
from normkit.bench.network_case import NetworkCase
from normkit.bench.spread import Spread
from normkit.bench.summary import FIGURES, summarize


def exactly(value):
    return Spread(value, value, value)


def made_up(case, threads=1, eager=2.0, multiple=1.5, **ratios):
    """A result of a real case, with numbers that we chose."""
    return Result(
        case.family,
        case.name,
        threads,
        case.facts(),
        ratios={"eager": exactly(eager)} | {name.replace("_", " "): exactly(r) for name, r in ratios.items()},
        multiples={"ours": exactly(multiple), "eager": exactly(multiple * eager)},
    )


def cases(family, **facts):
    found = [case for case in all_cases() if case.family == family]
    return [case for case in found if not facts or facts.items() <= case.facts().items()]


def figure(name, results, threads=1):
    (found,) = (row for row in summarize(results) if row.figure == name and row.threads == threads)
    return found


def test_figures_are_geometric_means_with_the_worst_case():
    nchw = cases("batch")[:4]
    results = [made_up(case, eager=eager) for case, eager in zip(nchw, (1.0, 2.0, 4.0, 8.0), strict=True)]
    found = figure("BN + ReLU training, NCHW fp32, over eager", results)
    assert found.value == pytest.approx(8**0.5)
    assert (found.cases, found.worst, found.worst_case, found.better) == (4, 1.0, nchw[0].name, "more")


@pytest.mark.parametrize(
    ("of", "better", "value", "reached"),
    [
        ("mean", "more", 1.99, True),  # of 1, 2 and 4
        ("mean", "more", 2.01, False),
        ("worst", "more", 1.0, True),
        ("worst", "more", 1.1, False),
        ("mean", "less", 2.01, True),
        ("mean", "less", 1.99, False),
        ("worst", "less", 4.0, True),
        ("worst", "less", 3.9, False),
    ],
)
def test_what_is_wanted_is_of_the_mean_or_of_every_case(of, better, value, reached):
    results = [Result("batch", str(n), 1, {"n": n}) for n in (1.0, 2.0, 4.0)]
    wanted = SummaryFigure("n", lambda r: True, lambda r: r.facts["n"], better=better, wanted=Wanted(value, of))
    found = row(wanted, 1, results)
    assert found.reached is reached
    assert (found.wanted, found.wanted_of, found.worst) == (value, of, 1.0 if better == "more" else 4.0)


def test_where_nothing_is_wanted_nothing_is_judged():
    found = figure("BN + ReLU training, all cases, over eager", [made_up(cases("batch")[0])])
    assert (found.wanted, found.reached) == (None, None)


def test_figures_are_over_the_cases_they_name():
    results = [made_up(case) for case in cases("batch")]
    counts = {found.figure: found.cases for found in summarize(results)}
    assert counts == {
        "BN + ReLU training, NCHW fp32, over eager": 7,
        "BN + ReLU training, channels_last fp32, over eager": 7,
        "BN + ReLU training, bf16, over eager": 5,
        "BN + ReLU training, 2-D fp32, over eager": 3,
        "BN + ReLU training, all cases, over eager": 22,
        "BN + ReLU training, the kernels' twelve cases, over eager": 12,
        "BN + add + ReLU training, over eager": 22,
        "BN training, no activation, over eager": 22,
        "BN + ReLU evaluation, over eager": 22,
        "BN + ReLU training, multiples of the limit, NCHW, from 8 MB on": 5,  # four in float32, one in bfloat16
        "BN + ReLU evaluation, multiples of the limit, NCHW, from 8 MB on": 5,
    }


HARD_FOR_TORCH = "GroupNorm(32) channels_last and 2-D, InstanceNorm, RMSNorm 2-D, LayerNorm channels_last, over eager"

# What the project is to reach, figure by figure, however the cases are arranged.
WANTED = {
    "everyday calls, training, over torch or published code": (1.0, "worst"),
    "everyday calls, evaluation, over torch or published code": (1.0, "worst"),
    "BN + ReLU training, NCHW fp32, over eager": (3.2, "mean"),
    "BN + ReLU training, channels_last fp32, over eager": (2.0, "mean"),
    "BN + ReLU training, bf16, over eager": (2.0, "mean"),
    "BN + ReLU training, 2-D fp32, over eager": (1.25, "mean"),
    "BN + add + ReLU training, over eager": (2.2, "mean"),
    "BN training, no activation, over eager": (2.0, "mean"),
    "BN + ReLU evaluation, over eager": (2.3, "mean"),
    "BN + ReLU training, multiples of the limit, NCHW, from 8 MB on": (1.7, "mean"),
    "BN + ReLU evaluation, multiples of the limit, NCHW, from 8 MB on": (1.3, "mean"),
    "BN + gelu training, over eager": (1.5, "mean"),
    "BN + leaky_relu evaluation, over eager": (1.5, "mean"),
    "BN with a mask, training: our time over that without": (1.4, "mean"),
    "FrozenBatchNorm2d evaluation: our time over our BatchNorm's": (1.5, "mean"),
    "BatchRenorm2d training: our time over our BatchNorm's": (1.5, "mean"),
    "EvoNormB0 training, over published code": (2.0, "mean"),
    "ScaleNorm evaluation, over published code": (2.0, "mean"),
    "LayerNorm2d training, over published code": (1.0, "worst"),
    "DynamicTanh evaluation, over published code": (1.0, "worst"),
    "GroupNorm(32) NCHW, over eager": (1.3, "mean"),
    "LayerNorm (M, 384 to 1024) bfloat16, over eager": (1.15, "mean"),
    "GroupNorm(32) channels_last and 2-D, InstanceNorm, RMSNorm 2-D, LayerNorm channels_last, over eager": (
        3.0,
        "mean",
    ),
    "a call on (32, 64), each layer that torch has, forward, over eager": (1.0, "worst"),
    "a call on (32, 64), each layer that torch has, forward + backward, over eager": (1.0, "worst"),
    "converted networks, training step, over eager": (1.08, "mean"),
    "converted networks, each training step, over eager": (0.98, "worst"),
    "converted networks, each evaluation step, over eager": (0.98, "worst"),
}


def test_what_is_to_be_reached_stands_beside_its_figure():
    wanted = {f.name: (f.wanted.value, f.wanted.of) for f in FIGURES if f.wanted is not None}
    assert wanted.items() >= WANTED.items()


def test_no_two_figures_have_one_name():
    names = [f.name for f in FIGURES]
    assert len(set(names)) == len(names)


def test_everyday_calls_are_over_torch_or_published_code():
    name = "everyday calls, training, over torch or published code"
    (float64, *_), (evo, *_) = cases("types", mode="training", everyday=True), cases("evo", mode="training")
    without_torch = Result("evo", evo.name, 1, evo.facts(), ratios={"published": exactly(8.0)})
    found = figure(name, [made_up(float64, eager=2.0), without_torch])
    assert (found.value, found.worst, found.worst_case) == (pytest.approx(4.0), 2.0, float64.name)


def test_how_far_a_relative_falls_behind_is_our_time_over_batch_norms():
    renorm = cases("relatives", title="BatchRenorm2d", mode="training")[0]
    result = made_up(renorm, published=3.0, our_BatchNorm=0.8)
    found = figure("BatchRenorm2d training: our time over our BatchNorm's", [result])
    assert (found.value, found.better, found.reached) == (pytest.approx(1.25), "less", True)


def test_what_a_mask_costs_is_our_time_over_our_own_without_it():
    masked = cases("masks", mode="training")[0]
    result = made_up(masked, eager=3.0, our_unmasked_call=0.5)
    found = figure("BN with a mask, training: our time over that without", [result])
    assert (found.value, found.reached) == (pytest.approx(2.0), False)


def test_the_better_compile_is_the_one_to_beat():
    case = cases("batch")[0]
    name = "BN + ReLU training, the kernels' twelve cases, over the better torch.compile"
    assert figure(name, [made_up(case, compile=9.0, compile_leaky=3.0)]).value == pytest.approx(3.0)


def test_of_the_limit_less_is_better_and_torchs_own_is_shown():
    large = [c for c in cases("batch", title="BN + ReLU", mode="evaluation", layout="NCHW") if c.input.bytes >= 8e6]
    results = [made_up(case, multiple=m) for case, m in zip(large, range(1, len(large) + 1), strict=True)]
    found = figure("BN + ReLU evaluation, multiples of the limit, NCHW, from 8 MB on", results)
    assert found.worst == len(large)
    assert found.eager == pytest.approx(2.0 * found.value)


def test_thread_counts_are_kept_apart():
    case = cases("batch")[0]
    results = [made_up(case, threads=1, eager=2.0), made_up(case, threads=2, eager=3.0)]
    name = "BN + ReLU training, all cases, over eager"
    assert [figure(name, results, threads).value for threads in (1, 2)] == pytest.approx([2.0, 3.0])


def test_options_have_a_row_for_each_of_their_values():
    rows = {found.figure: found.cases for found in summarize([made_up(case) for case in cases("options")])}
    total = len(cases("options"))
    assert all(name.startswith("options: ") for name in rows)
    for option, values in (("mask", 2), ("residual", 2), ("mode", 2), ("dtype", 3), ("layout", 5), ("activation", 7)):
        counts = [n for name, n in rows.items() if name.startswith(f"options: {option} ")]
        assert len(counts) == values
        assert sum(counts) == total


def test_memory_is_a_share():
    saved = Result("memory", "saved 1,2", 1, {"input_bytes": 100}, bytes={"ours": 100, "eager": 200})
    peak = Result("memory", "peak net", 1, bytes={"ours": 60, "eager": 100})
    rows = {found.figure: found for found in summarize([saved, peak])}
    kept, most = rows.values()
    assert (kept.value, kept.eager) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (most.value, most.better) == (pytest.approx(0.6), "less")


def test_who_did_not_run_has_no_figure():
    assert summarize([Result("batch", "x", 1, cases("batch")[0].facts(), errors={"ours": "broken"})]) == []
    assert summarize([Result("memory", "peak net", 1, bytes={"eager": 100}, errors={"ours": "broken"})]) == []
    assert summarize([]) == []


def test_every_case_has_a_figure_and_every_figure_a_case():
    results = [made_up(case) for case in all_cases() if isinstance(case, LayerCase | NetworkCase)] + [
        Result("memory", "saved 1,2", 1, {"input_bytes": 1}),
        Result("memory", "peak net", 1),
        *(Result(case.family, case.name, 1) for case in cases("models")),
    ]
    assert [r.name for r in results if not any(f.selects(r) for f in FIGURES)] == []
    assert [f.name for f in FIGURES if not any(f.selects(r) for r in results)] == []
