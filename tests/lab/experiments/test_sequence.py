"""The verdict follows from the records; arms differ in their norm, its place and the rate alone."""

from pathlib import Path

import pytest
import torch

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab import data, run_experiment
from normkit.lab.experiment import Trial
from normkit.lab.experiments.sequence import (
    EXPERIMENT,
    KINDS,
    NORMS,
    RATES,
    SIZES,
    at_best_rate,
    behind,
    bits,
    does_as_well,
    does_worse,
    net,
    trains,
    trains_at_more,
)
from normkit.lab.models.transformer import TokenBatchNorm
from normkit.lab.prediction import Prediction
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial
from support.depth import thinned
from support.interrupted import assert_resumed_as_unbroken

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
DESK = RATES["desk"]


def trial(arm, seed, end, status="done", population=None):
    """A trial that falls from 4 bits to its end; a code by frequencies has 4.4."""
    settings = {"rate": float(arm.rpartition("-")[2])}
    header = {"experiment": "sequence", "arm": arm, "seed": seed, "scale": "desk", "settings": settings}
    measured = [
        {"step": step, "seconds": 1.0, "loss": 2.0, "bits": of, "accuracy": 0.4, "unigram": 4.4}
        for step, of in ((0, 6.5), (100, max(4.0, end)), (200, end))
    ]
    if "batch" in arm:
        measured = [line | {"population": line["bits"] if population is None else population} for line in measured]
    return TrialRecord(Path(), header, measured, {"status": status, "step": 200} if status else None)


def run_of(pre=4, post=2, rms=0.0, scale=0.0, batch=0.2, status="done", left_out=None):
    """Three seeds: how many rates train with layer norm, and what norms are behind it; each maybe by seed."""

    def of(value, seed):
        return value[seed] if isinstance(value, tuple) else value

    trials = []
    for arm in EXPERIMENT.arms("desk"):
        norm, rate = arm.settings["norm"], DESK.index(arm.settings["rate"])
        for seed in range(3):
            end = 2.6 + 0.1 * abs(rate - 1)  # the second rate is the best
            end += of({"rms": rms, "scale": scale, "batch": batch}.get(norm, 0.0), seed)
            if norm == "layer" and rate >= of(pre if arm.settings["placement"] == "pre" else post, seed):
                end = 4.3
            if arm.name != left_out:
                trials.append(trial(arm.name, seed, end, status))
    return Run(Path(), trials)


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(pre=(4, 3, 4), post=(2, 2, 3)), "supported"),
        (run_of(pre=(4, 3, 4), post=(2, 3, 3)), "unclear"),  # one seed as many
        (run_of(pre=3, post=3), "contradicted"),  # (a) as many
        (run_of(pre=2, post=4), "contradicted"),
        (run_of(pre=4, post=4), "unclear"),  # the grid does not tell
        (run_of(rms=0.04, scale=-0.3), "supported"),
        (run_of(rms=0.07), "unclear"),  # (b) more than the margin
        (run_of(scale=(0.0, 0.07, 0.0)), "unclear"),
        (run_of(scale=0.12), "contradicted"),
        (run_of(scale=(0.12, 0.12, 0.0)), "unclear"),
        (run_of(batch=0.03), "unclear"),  # (c) less than the margin
        (run_of(batch=(0.2, 0.2, 0.03)), "unclear"),
        (run_of(batch=0.0), "contradicted"),
        (run_of(batch=-0.1), "contradicted"),
        (run_of(status="diverged"), "unclear"),  # nothing trains at all
        (run_of(status=None), "unclear"),
        (run_of(left_out="pre-rms-0.01"), "unclear"),
        (run_of(left_out="pre-layer-0.01"), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_parts_of_the_verdict():
    found = [trains_at_more(*of, 4) for of in ((3, 2), (4, 4), (0, 0), (3, 3), (2, 4))]
    assert found == [True, None, None, False, False]
    found = [does_as_well(*of) for of in ((0.04, -1.0), (0.0, 0.06), (0.06, 0.06), (0.0, 0.11), (float("inf"), 0.0))]
    assert found == [True, None, None, False, False]
    assert [does_worse(of) for of in (0.06, 0.04, 0.0, -0.1, float("inf"))] == [True, None, False, False, True]
    assert does_as_well(float("nan"), 0.0) is does_worse(float("nan")) is None  # both diverged


def test_a_trial_counts_with_its_lowest_bits_and_not_if_it_diverged():
    found = trial("pre-layer-0.01", 0, 2.5)
    assert bits(found) == 2.5
    found.measured.append(found.measured[-1] | {"bits": 2.8})
    assert bits(found) == 2.5
    assert bits(trial("pre-layer-0.01", 0, 2.5, "diverged")) == float("inf")


def test_what_trains_is_judged_by_the_best_of_its_seed():
    def seed_of(seed, best, end):
        ends = [(f"pre-layer-{rate:g}", end) for rate in DESK] + [("pre-rms-0.01", best)]
        return [trial(arm, seed, of) for arm, of in ends]

    # Half of what 2.4 takes off 4.4 leaves 3.4.
    run = Run(Path(), [*seed_of(0, 2.4, 3.3), *seed_of(1, 2.4, 3.5), *seed_of(2, 3.0, 3.5)])
    assert trains(run, "pre-layer", DESK) == {0: [*DESK], 1: [], 2: [*DESK]}
    assert trains(Run(Path(), run.trials[1:]), "pre-layer", DESK).keys() == {1, 2}  # one rate has not ended


def test_each_net_is_judged_at_the_rate_that_suits_it():
    ends = {"pre-rms-0.001": (2.7, 2.5, 2.9), "pre-rms-0.003": (2.6, 2.6, 2.6), "pre-layer-0.01": (2.5, 2.5, 2.5)}
    run = Run(Path(), [trial(arm, seed, end) for arm, of in ends.items() for seed, end in enumerate(of)])
    chosen = {kind: at_best_rate(run, kind, DESK) for kind in KINDS}
    assert {t.arm for t in chosen["pre-rms"].values()} == {"pre-rms-0.003"}
    assert behind(chosen, "rms") == pytest.approx({0: 0.1, 1: 0.1, 2: 0.1})
    assert behind(chosen, "batch") == {}


def test_population_statistics_are_set_beside_the_stored_ones():
    run = run_of()
    trials = [
        trial(t.arm, t.seed, bits(t), population=bits(t) - 0.15) if t.arm.startswith("pre-batch") else t
        for t in run.trials
    ]
    findings = EXPERIMENT.findings(Run(Path(), trials))
    reason = next(text for text in findings.reasons if text.startswith("(c)"))
    assert "0.200 (0.200 to 0.200) bits, and by 0.050 (0.050 to 0.050) with population statistics" in reason
    (row,) = [row for row in findings.tables[1].rows if row[0] == "pre-batch"]
    assert row[1:4] == ["0.003", "2.800 (2.800 to 2.800)", "2.650 (2.650 to 2.650)"]


def test_arms_differ_in_norm_place_and_rate_alone():
    for scale, rates in RATES.items():
        arms = EXPERIMENT.arms(scale)
        assert [arm.name for arm in arms] == [f"{kind}-{rate:g}" for kind in KINDS for rate in rates]
        assert all(arm.settings.items() >= SIZES[scale].items() for arm in arms)


def test_nets_start_from_the_same_weights_and_have_the_arms_norms():
    first, *others = (net(arm.settings, 9, seed=4) for arm in ARMS.values())
    weights = [p for p in first.parameters() if p.ndim > 1]
    for other in others:
        assert all(
            torch.equal(a, b) for a, b in zip(weights, (p for p in other.parameters() if p.ndim > 1), strict=True)
        )
    for arm in ARMS.values():
        kind, is_pre = NORMS[arm.settings["norm"]], arm.settings["placement"] == "pre"
        model = net(arm.settings, 9, seed=4)
        assert sum(isinstance(m, kind) for m in model.modules()) == 4 + is_pre
        assert {m.placement for m in model.residuals} == {arm.settings["placement"]}


def test_rates_fall_from_the_first_step_on_without_a_warm_up():
    training = EXPERIMENT.training(Trial("sequence", ARMS["pre-layer-0.01"], 0, "quick", "moby-mini"))
    assert [training.rate(step) for step in (0, 6)] == pytest.approx([0.01, 0.005])


def test_windows_depend_on_seed_and_step_alone():
    def first(name, seed):
        return next(EXPERIMENT.training(Trial("sequence", ARMS[name], seed, "quick", "moby-mini")).batches(0))[0]

    assert torch.equal(first("pre-layer-0.01", 1), first("pre-batch-0.001", 1))
    assert not torch.equal(first("pre-layer-0.01", 1), first("pre-layer-0.01", 2))


def test_measuring_population_statistics_leaves_the_net_as_it_was():
    training = EXPERIMENT.training(Trial("sequence", ARMS["pre-batch-0.01"], 0, "quick", "moby-mini"))
    model = training.model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = training.measure(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found["population"] != found["bits"]
    xs = [x for (x, _), _ in zip(training.batches(0), range(8), strict=False)]
    nk.recalibrate(model, xs, method="paper", inplace=True)
    task = Prediction(data.load_text("moby-mini"), SIZES["quick"]["length"], SIZES["quick"]["test"])
    with torch.no_grad():
        assert found["population"] == task.measure(model)["bits"]
    assert isinstance(model.norm, TokenBatchNorm)


@pytest.mark.parametrize("name", thinned(ARMS, lambda name: name == "pre-batch-0.01"))
def test_a_quick_trial_runs_and_is_resumed(name, tmp_path):
    one = Trial("sequence", ARMS[name], 0, "quick", "moby-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert found.end["step"] == 12
    assert ("population" in found.measured[-1]) == ("batch" in name)
    assert found.measured[-1]["bits"] < found.measured[0]["bits"]
    assert_resumed_as_unbroken(EXPERIMENT, one, found, tmp_path / "resumed", steps=9)


@pytest.mark.deep
def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("to be, or not to be: that is the question.\n" * 300)
    found = run_experiment("sequence", tmp_path / "run", scale="quick", data=str(path), jobs=1)
    (section,) = found.sections
    assert section.findings.outcome in ("supported", "contradicted", "unclear")
    assert {t.header["data"] for t in section.run.trials} == {str(path)}


def test_nothing_is_written_for_a_text_that_will_not_do(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("too short")
    for wrong, words in ((str(path), "needs 10,000 characters"), ("mnist", "A text needs the name moby-mini")):
        with pytest.raises((ArgumentError, data.DataError), match=words):
            run_experiment("sequence", tmp_path / "run", scale="quick", data=wrong)
    with pytest.raises(ArgumentError, match="moby-mini is a text"):
        run_experiment("whitening", tmp_path / "run", scale="quick", data="moby-mini")
    assert not (tmp_path / "run").exists()
