"""The verdict follows from the records, and movement is that of the nets an arm describes."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab.experiment import Trial
from normkit.lab.experiments.coupling import EXPERIMENT, JUDGED, KINDS, NETS, gap, movements, slopes
from normkit.lab.models import initialize_
from normkit.lab.models.relu_nets import relu_mlp
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("desk")}
QUICK = {arm.name: arm for arm in EXPERIMENT.arms("quick")}
SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


def record(arm, seed, measured, status="done"):
    header = {"arm": arm, "seed": seed, "scale": "desk", "settings": ARMS[arm].settings}
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


def moved_by(power):
    """Movement by a power of the batch, but for the smallest batches, which have no say."""
    return [9.0 if size < 8 else size**power for size in SIZES]


def lines(kind, test, powers, evaluation, plain):
    found = [{"step": 0, "accuracy": 0.1, "training_accuracy": 0.1}]
    found.append({"step": 2000, "accuracy": test, "training_accuracy": 1.0, "loss": 0.01})
    for line, power in zip(found, powers, strict=True):
        if kind == "whole":
            line |= {"moved": moved_by(power), "moved_in_evaluation": evaluation}
        elif kind == "plain":
            line |= {"moved": [plain] * len(SIZES), "moved_in_evaluation": 0.0}
    return found


def run_of(nets=NETS, chunked=0.82, powers=(-0.5, -0.45), evaluation=1e-8, plain=0.0, seeds=2, status="done"):
    """A run that supports the claim, but for changes to these nets; the whole batch comes to 0.8 on test images."""
    trials = []
    for seed in range(seeds):
        for net in NETS:
            other = (0.82, (-0.5, -0.45), 1e-8, 0.0)
            test, *rest = (chunked, powers, evaluation, plain) if net in nets else other
            ends = {kind: test if kind == JUDGED else 0.8 for kind in KINDS}
            trials += [record(f"{net}-{k}", seed, lines(k, end, *rest), status) for k, end in ends.items()]
    return Run(Path(), trials)


def mixed(one, other):
    return Run(Path(), [t for t in one.trials if t.seed == 0] + [t for t in other.trials if t.seed == 1])


FAILURES = [
    {"chunked": 0.78},
    {"chunked": 0.8},  # no narrower
    {"powers": (-0.5, -0.3)},
    {"powers": (-0.7, -0.5)},
    {"evaluation": 1e-3},
    {"plain": 1e-3},
]


def test_a_run_that_supports_the_claim():
    assert EXPERIMENT.findings(run_of()).outcome == "supported"


@pytest.mark.parametrize("changes", FAILURES, ids=str)
def test_a_part_that_fails(changes):
    assert EXPERIMENT.findings(run_of(**changes)).outcome == "contradicted"
    assert EXPERIMENT.findings(run_of(nets=("mlp",), **changes)).outcome == "unclear"  # nets disagree
    assert EXPERIMENT.findings(mixed(run_of(), run_of(**changes))).outcome == "unclear"  # seeds disagree


def test_a_gap_that_closes_because_less_is_learnt_is_no_support():
    run = run_of()
    for trial in run.of(f"mlp-{JUDGED}"):
        trial.measured[-1].update(accuracy=0.75, training_accuracy=0.9)
    assert gap(run.of(f"mlp-{JUDGED}")[0]) < gap(run.of("mlp-whole")[0])
    assert EXPERIMENT.findings(run).outcome == "unclear"


def test_a_divergence_says_nothing_of_gaps():
    trials = [record(t.arm, t.seed, t.measured, "diverged") if "whole" in t.arm else t for t in run_of().trials]
    assert EXPERIMENT.findings(Run(Path(), trials)).outcome == "unclear"


def test_a_run_that_is_not_complete_is_unclear():
    assert EXPERIMENT.findings(run_of(status=None)).outcome == "unclear"
    trials = run_of().trials
    for some in (trials[:1], trials[1:2], trials[4:6], trials[:-1]):
        assert EXPERIMENT.findings(Run(Path(), some)).outcome == "unclear"


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(run_of(nets=("conv",), chunked=0.83, powers=(-0.55, -0.6)))
    moved, gaps = (table.rows for table in findings.tables)
    untrained, trained = 16**-0.5, 16**-0.45
    cells = [f"{value:.4f} ({value:.4f} to {value:.4f})" for value in (untrained, trained)]
    assert ["mlp-whole", 16, *cells] in moved
    assert ["conv-plain", 256, "0.0000 (0.0000 to 0.0000)", "0.0000 (0.0000 to 0.0000)"] in moved
    whole, chunked = (next(row for row in gaps if row[0] == arm) for arm in ("conv-whole", f"conv-{JUDGED}"))
    assert whole[1:4] == [f"{value} ({value} to {value})" for value in ("100.00", "80.00", "20.00")]
    assert chunked[3] == "17.00 (17.00 to 17.00)"
    assert "up to 1e-08 in evaluation, and by up to 0 in the plain net" in findings.reasons[0]
    assert "conv -0.550 (-0.550 to -0.550) untrained, conv -0.600 (-0.600 to -0.600) trained" in findings.reasons[1]
    assert "narrower in 2 of 2 seeds" in findings.reasons[2]
    assert [curve.name for curve in findings.figures[0].curves][2:] == ["conv, untrained", "conv, trained"]
    assert list(findings.figures[0].curves[2].y) == moved_by(-0.55)


def test_slopes_leave_the_smallest_batches_out():
    trial = record("mlp-whole", 0, lines("whole", 0.8, (-0.5, -0.25), 0.0, 0.0))
    assert slopes(trial) == pytest.approx((-0.5, -0.25))


# ---- nets


def randomized(norm, seed):
    model = relu_mlp(norm, 12, (16, 16), 4)
    initialize_(model, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_outputs_move_in_training_with_a_norm_alone(seed):
    model = randomized(nk.BatchNorm1d, seed)
    x = torch.randn(200, 12)
    found = movements(model, x, (4, 64), 6)
    assert found["moved_in_evaluation"] < 1e-6
    assert found["moved"][0] > found["moved"][1] > 0.01
    plain = movements(randomized(None, seed), x, (4, 64), 6)
    assert max(*plain["moved"], plain["moved_in_evaluation"]) < 1e-6
    across_features = movements(randomized(nn.LayerNorm, seed), x, (4, 64), 6)
    assert max(across_features["moved"]) < 1e-6
    assert movements(model, x, (), 6) == {}


def test_measuring_movement_leaves_no_trace():
    model = randomized(nk.BatchNorm1d, 0)
    model(torch.randn(32, 12))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    movements(model, torch.randn(50, 12), (4,), 4)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def training_of(name, seed=3):
    torch.manual_seed(seed)
    return EXPERIMENT.training(Trial("coupling", QUICK[name], seed, "quick", "fashion-mini"))


@pytest.mark.parametrize("net", NETS)
def test_arms_differ_in_their_norms_alone(net):
    trainings = {kind: training_of(f"{net}-{kind}") for kind in KINDS}
    first = next(trainings["whole"].batches(0))
    weights = [m.weight for m in trainings["whole"].model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for kind, training in trainings.items():
        norms = [m for m in training.model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        own = [m.weight for m in training.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first, next(training.batches(0)), strict=True))
        assert [getattr(n, "chunk_size", None) for n in norms[:1]] == {
            "plain": [],
            "chunk-4": [4],
            "chunk-16": [16],
            "chunk-64": [64],
            "whole": [None],
        }[kind]


def test_seeds_have_images_of_their_own():
    one, same, other = (next(training_of("mlp-whole", seed).batches(0))[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["mlp-whole", "conv-whole", "mlp-plain", f"conv-{JUDGED}"])
def test_a_quick_trial(name, tmp_path):
    run_trial(
        EXPERIMENT, Trial("coupling", QUICK[name], 0, "quick", "fashion-mini"), RunOptions(tmp_path), lambda *_: None
    )
    (trial,) = read_run(tmp_path).trials
    assert [line["step"] for line in trial.measured] == [0, 20]
    assert all(math.isfinite(line["training_accuracy"]) for line in trial.measured)
    if JUDGED in name:
        assert "moved" not in trial.measured[0]
    else:
        assert max(line["moved_in_evaluation"] for line in trial.measured) < 1e-5
        assert (min(min(line["moved"]) for line in trial.measured) > 1e-3) == ("whole" in name)
    assert EXPERIMENT.findings(read_run(tmp_path)).outcome == "unclear"
