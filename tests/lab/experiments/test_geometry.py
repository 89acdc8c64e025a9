"""The verdict follows from the records, and a trial measures what its arm says."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.geometry import EXPERIMENT, JUDGED, MARGINS, NETS, STARTS, WHOLE, jitter_slopes, number
from normkit.lab.partition import units_of
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("desk")}
QUICK = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
SUPPORTING = {
    "bn": {"identity": 1e-14, "distances": [1.0, 0.9], "near": 0.4, "elsewhere": 0.2, "crossings": [0.5, 0.7]},
    "zero": {"identity": 0.5, "distances": [1.5, 1.7], "near": 0.3, "elsewhere": 0.2, "crossings": [0.4, 0.4]},
    "random": {"identity": 0.9, "distances": [2.5, 2.7], "near": 0.2, "elsewhere": 0.2, "crossings": [0.3, 0.3]},
}
WIDE, NARROW = 1.2, 0.9


def record(arm, seed, measured, status="done"):
    header = {"arm": arm, "seed": seed, "scale": "desk", "settings": ARMS[arm].settings}
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def jitter(power):
    """Of two layers, at the sizes of the desk scale; the second moves twice as far."""
    return [[size**power, 2 * size**power] for size in (4, 16, 64, 256)]


def margins(value, accuracy=0.8):
    def probes(scale):
        layers = {"1.norm": 70.0, "": value * scale}
        return [{"step": 0, "probe": "BoundaryDistances", "layer": k, "median": v} for k, v in layers.items()]

    return [{"step": s, "accuracy": accuracy, "loss": 0.5, "probes": probes(f)} for s, f in ((400, 0.5), (800, 1.0))]


def run_of(nets=NETS, power=-0.5, chunked=WIDE, seeds=2, status="done", **changes):
    """A run that supports the claim, but for changes of what these nets measured at their start with BN."""
    trials = []
    for seed in range(seeds):
        for net in NETS:
            for kind in STARTS:
                line = {"step": 0, **SUPPORTING[kind]}
                if kind == "bn":
                    line |= {"jitter": jitter(power if net in nets else -0.5)} | (changes if net in nets else {})
                trials.append(record(f"{net}-{kind}", seed, [line], status))
        trials += [record(arm, seed, margins(chunked if arm == JUDGED else 1.0), status) for arm in MARGINS]
    return Run(Path(), trials)


def mixed(one, other):
    return Run(Path(), [t for t in one.trials if t.seed == 0] + [t for t in other.trials if t.seed == 1])


FAILURES = [
    {"distances": [1.0, 3.0]},  # in the mean, more than with a bias
    {"identity": 1e-9},
    {"near": 0.25},  # less of a concentration than with a bias of zero
    {"crossings": [0.5, 0.2]},
    {"power": -0.3},
]


def test_a_run_that_supports_the_claim():
    assert EXPERIMENT.findings(run_of()).outcome == "supported"


@pytest.mark.parametrize("changes", FAILURES, ids=str)
def test_a_part_that_fails(changes):
    assert EXPERIMENT.findings(run_of(**changes)).outcome == "contradicted"
    assert EXPERIMENT.findings(run_of(nets=("conv",), **changes)).outcome == "unclear"  # nets disagree
    assert EXPERIMENT.findings(mixed(run_of(), run_of(**changes))).outcome == "unclear"  # seeds disagree


def test_margins_that_do_not_widen():
    assert EXPERIMENT.findings(run_of(chunked=NARROW)).outcome == "contradicted"
    assert EXPERIMENT.findings(run_of(chunked=1.0)).outcome == "contradicted"  # as wide
    assert EXPERIMENT.findings(mixed(run_of(), run_of(chunked=NARROW))).outcome == "unclear"


def test_data_must_have_more_than_their_share():
    poor = {kind: SUPPORTING[kind] | {"near": 0.1} for kind in STARTS}
    run = run_of(near=0.19)
    for trial in run.trials:
        kind = trial.arm.split("-")[1]
        if kind in ("zero", "random") and "margin" not in trial.arm:
            trial.measured[0]["near"] = poor[kind]["near"]
    assert EXPERIMENT.findings(run).outcome == "contradicted"


def test_a_run_that_is_not_complete_is_unclear():
    assert EXPERIMENT.findings(run_of(status=None)).outcome == "unclear"
    trials = run_of().trials
    for some in (trials[:1], trials[:5], trials[6:8], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def test_a_divergence_says_nothing_of_margins():
    run = run_of()
    trials = [record(t.arm, t.seed, t.measured, "diverged") if t.arm == WHOLE else t for t in run.trials]
    assert EXPERIMENT.findings(Run(Path(), trials)).outcome == "unclear"


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(nets=("mlp",), power=-0.45))
    starts, ends = (table.rows for table in findings.tables)
    triple = {value: f"{value:.3f} ({value:.3f} to {value:.3f})" for value in (0.95, 0.4, 0.2, 2.0, 0.6)}
    assert starts[0] == ["mlp-bn", *(triple[value] for value in (0.95, 0.4, 0.2, 2.0, 0.6))]
    assert ends[1][:2] == [JUDGED, "1.200 (1.200 to 1.200)"]
    assert "mlp bn 0.95 (0.95 to 0.95), zero 1.60" in findings.reasons[0]
    assert "off by 1e-14 at most" in findings.reasons[0]
    assert "It holds for mlp with 2 and for conv with 2 of 2 seeds" in findings.reasons[1]
    assert "mlp -0.450 (-0.450 to -0.450); conv -0.500" in findings.reasons[3]
    assert "margin-whole 1.000 (1.000 to 1.000); wider with chunks in 2 of 2 seeds" in findings.reasons[4]
    jitters, widths = findings.figures
    assert list(jitters.curves[1].y) == pytest.approx([1.5 * size**-0.5 for size in (4, 16, 64, 256)])
    assert [list(curve.y) for curve in widths.curves][1] == [0.6, 1.2]


def test_slopes_are_by_layer():
    line = {
        "batches": [4, 16, 64],
        "jitter": [[4**-0.5, 3 * 4**-0.2], [16**-0.5, 3 * 16**-0.2], [64**-0.5, 3 * 64**-0.2]],
    }
    assert jitter_slopes(line) == pytest.approx([-0.5, -0.2])
    assert number({"near": 0.1, "elsewhere": 0.0}, "ratio") == math.inf


def training_of(name, seed=3):
    torch.manual_seed(seed)
    return EXPERIMENT.training(Trial("geometry", QUICK[name], seed, "quick", "fashion-mini"))


@pytest.mark.parametrize("net", NETS)
def test_starts_see_the_same_images(net):
    states = []
    for kind in STARTS:
        training_of(f"{net}-{kind}")
        states.append(torch.get_rng_state())  # all images and points are drawn from it
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("net", NETS)
def test_starts_have_the_same_weights_and_differ_in_their_biases(net):
    bn, zero, random = (units_of(training_of(f"{net}-{kind}").model) for kind in STARTS)
    for units in zip(bn, zero, random, strict=True):
        assert all(torch.equal(unit.layer.weight, units[0].layer.weight) for unit in units)
        assert units[0].layer.bias is None
        assert not units[1].layer.bias.any()
        assert units[2].layer.bias.abs().min() > 0


def test_trainings_differ_in_their_chunks_alone():
    trainings = [training_of(arm) for arm in MARGINS]
    norms = [[m for m in t.model.modules() if isinstance(m, nn.BatchNorm1d)] for t in trainings]
    assert [getattr(of[0], "chunk_size", None) for of in norms] == [4, 16, 64, None]
    assert type(norms[-1][0]) is nk.BatchNorm1d
    state = trainings[0].model.state_dict()
    assert all(torch.equal(state[k], v) for t in trainings for k, v in t.model.state_dict().items())


def run_quick(name, out):
    run_trial(EXPERIMENT, Trial("geometry", QUICK[name], 0, "quick", "fashion-mini"), RunOptions(out), lambda *_: None)
    (trial,) = read_run(out).of(name)
    return trial


@pytest.mark.parametrize("name", ["mlp-bn", "conv-bn", "conv-random"])
def test_a_quick_start(name, tmp_path):
    trial = run_quick(name, tmp_path)
    (line,) = trial.measured
    assert trial.end["status"] == "done"
    assert (line["identity"] < 1e-10) == name.endswith("bn")
    assert ("jitter" in line) == name.endswith("bn")
    assert 0 < line["near"] < 1
    assert EXPERIMENT.findings(read_run(tmp_path)).outcome == "unclear"


def test_a_quick_training(tmp_path):
    trial = run_quick(JUDGED, tmp_path)
    assert [line["step"] for line in trial.measured] == [15, 30]
    assert {record["layer"] for record in trial.measured[-1]["probes"]} == {"1.norm", "2.norm", ""}
    curve = EXPERIMENT.findings(read_run(tmp_path)).figures[1].curves[1]
    assert len(curve.y) == 2
    assert min(curve.y) > 0
