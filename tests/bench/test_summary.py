import pytest

from normkit.bench.case import Result
from normkit.bench.cases import CASES
from normkit.bench.layer_case import LayerCase
from normkit.bench.spread import Spread
from normkit.bench.summary import FIGURES, summarize


def exactly(value):
    return Spread(value, value, value)


def made_up(case, threads=1, eager=2.0, multiple=1.5, **ratios):
    """A result of a real case, with numbers that we chose."""
    return Result(
        case.group,
        case.name,
        threads,
        case.facts(),
        ratios={"eager": exactly(eager)} | {name.replace("_", "-"): exactly(r) for name, r in ratios.items()},
        multiples={"ours": exactly(multiple), "eager": exactly(multiple * eager)},
    )


def cases(group):
    return [case for case in CASES if case.group == group]


def figure(name, results, threads=1):
    (row,) = (row for row in summarize(results) if row.figure == name and row.threads == threads)
    return row


def test_figures_are_geometric_means_with_the_worst_case():
    nchw = cases("bn")[:4]
    results = [made_up(case, eager=eager) for case, eager in zip(nchw, (1.0, 2.0, 4.0, 8.0), strict=True)]
    row = figure("BN + ReLU training, NCHW fp32, over eager", results)
    assert row.value == pytest.approx(8**0.5)
    assert (row.cases, row.worst, row.worst_case, row.better) == (4, 1.0, nchw[0].name, "more")


def test_figures_are_over_the_cases_they_name():
    results = [made_up(case) for case in cases("bn")]
    counts = {row.figure: row.cases for row in summarize(results)}
    assert counts == {
        "BN + ReLU training, NCHW fp32, over eager": 4,
        "BN + ReLU training, channels_last fp32, over eager": 4,
        "BN + ReLU training, all cases, over eager": 12,
        "training, multiples of the limit, NCHW, from 8 MB on": 4,  # three in float32, one in bfloat16
    }


def test_the_better_compile_is_the_one_to_beat():
    case = cases("bn")[0]
    row = figure(
        "BN + ReLU training, all cases, over the better torch.compile", [made_up(case, compile=9.0, compile_leaky=3.0)]
    )
    assert row.value == pytest.approx(3.0)


def test_of_the_limit_less_is_better_and_torchs_own_is_shown():
    large = [case for case in cases("bn-eval") if case.facts()["input_bytes"] >= 8e6]
    results = [made_up(case, multiple=m) for case, m in zip(large, range(1, len(large) + 1), strict=True)]
    row = figure("evaluation, multiples of the limit, from 8 MB on", results)
    assert row.worst == len(large)
    assert row.eager == pytest.approx(2.0 * row.value)


def test_thread_counts_are_kept_apart():
    case = cases("bn")[0]
    results = [made_up(case, threads=1, eager=2.0), made_up(case, threads=2, eager=3.0)]
    name = "BN + ReLU training, all cases, over eager"
    assert [figure(name, results, threads).value for threads in (1, 2)] == pytest.approx([2.0, 3.0])


def test_memory_is_a_share():
    saved = Result("memory", "saved 1,2", 1, {"input_bytes": 100}, bytes={"ours": 100, "eager": 200})
    peak = Result("memory", "peak net", 1, bytes={"ours": 60, "eager": 100})
    rows = {row.figure: row for row in summarize([saved, peak])}
    kept, most = rows.values()
    assert (kept.value, kept.eager) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (most.value, most.better) == (pytest.approx(0.6), "less")


def test_who_did_not_run_has_no_figure():
    assert summarize([Result("bn", "32,64,56,56", 1, cases("bn")[0].facts(), errors={"ours": "broken"})]) == []
    assert summarize([Result("memory", "peak net", 1, bytes={"eager": 100}, errors={"ours": "broken"})]) == []
    assert summarize([]) == []


def test_every_group_has_a_figure_and_every_figure_a_case():
    results = [made_up(case) if isinstance(case, LayerCase) else None for case in CASES]
    results = [r for r in results if r] + [
        Result("memory", "saved 1,2", 1, {"input_bytes": 1}),
        Result("memory", "peak net", 1),
        *(Result(case.group, case.name, 1) for case in cases("models")),
    ]
    assert all(any(f.selects(r) for f in FIGURES) for r in results)
    assert all(any(f.selects(r) for r in results) for f in FIGURES)
