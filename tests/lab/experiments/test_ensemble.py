"""The verdict follows from the records, members are varied as was said, and each is trained as if it were alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.lab import data
from normkit.lab.data.types import Images
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.experiments.ensemble import EXPERIMENT, MEMBERS, TIMES, _accuracies, end_errors, key, sum_of_losses
from normkit.lab.record import Run, TrialRecord, read_trial
from normkit.lab.trial import RunOptions, run_trial, trial_paths

VARIATIONS = [MEMBERS[0], MEMBERS[5]]


def record(ensemble, members, seed=0, status="done"):
    """Errors in percent, of the ensemble and of each member: top-1 and top-5 with a single crop, and with ten."""
    header = {"experiment": "ensemble", "arm": "ensemble", "seed": seed, "settings": {"members": VARIATIONS}}
    names = ["ensemble", *(f"member {i + 1}" for i in range(len(members)))]
    line = {
        key(who, top, count): 1 - error / 100
        for who, errors in zip(names, [ensemble, *members], strict=True)
        for (top, count), error in zip([(1, 1), (5, 1), (1, 10), (5, 10)], errors, strict=True)
    }
    measured = [{"step": 0, "seconds": 0.0, **dict.fromkeys(line, 0.1)}, {"step": 100, "seconds": 9.0, **line}]
    return TrialRecord(Path(), header, measured, {"status": status} if status else None)


GOOD = record([9, 1, 8, 1], [[12, 1, 11, 1], [11, 1, 12, 2]])
BAD = record([11, 1, 11, 1], [[12, 2, 11, 2], [11, 2, 12, 2]], seed=1)  # no lower than the best, either way


@pytest.mark.parametrize(
    ("trials", "outcome"),
    [
        ([GOOD, GOOD], "supported"),
        ([BAD, BAD], "contradicted"),
        ([GOOD, BAD], "unclear"),
        ([record([9, 2, 8, 1], [[12, 1, 11, 1], [11, 1, 12, 1]])], "unclear"),  # more top-5 errors
        ([record([9, 1, 11, 1], [[12, 1, 11, 1], [11, 1, 12, 1]])], "unclear"),  # no better with ten crops
        ([GOOD, record([9, 1, 8, 1], [[12, 1, 11, 1], [11, 1, 12, 1]], status=None)], "unclear"),
        ([GOOD, record([9, 1, 8, 1], [[12, 1, 11, 1], [11, 1, 12, 1]], status="diverged")], "unclear"),
    ],
)
def test_the_verdict(trials, outcome):
    findings = EXPERIMENT.findings(Run(Path(), trials))
    assert findings.outcome == outcome
    assert ("diverged or have not ended" in findings.reasons[-1]) == any(
        trial.end is None or trial.end["status"] == "diverged" for trial in trials
    )


def test_the_best_member_is_one_net_with_both_its_errors():
    errors = end_errors(record([9, 1, 8, 1], [[12, 0, 11, 3], [11, 2, 11, 1]]))
    assert errors["best member"] == pytest.approx([11, 2, 11, 1])  # of equal top-1 errors, the lower top-5 error
    assert errors["mean of the members"] == pytest.approx([11.5, 1, 11, 2])


def test_the_numbers_are_those_of_the_records():
    findings = EXPERIMENT.findings(Run(Path(), [GOOD, BAD]))
    rows = {row[0]: row[1:] for row in findings.tables[0].rows}
    assert rows["best member"] == [*["11.00 (11.00 to 11.00)", "1.50 (1.00 to 2.00)"] * 2, None]
    assert rows["ensemble"][0] == "10.00 (9.00 to 11.00)"
    assert rows["member 1"][-1] == "initial convolutions x2"
    assert rows["member 2"][-1] == "Dropout 5%, BN per activation in the last module"
    assert "in 1 of 2 seeds" in findings.reasons[0]
    whole = findings.figures[0].curves
    assert [curve.name for curve in whole] == ["member 1", "member 2", "ensemble"]
    assert whole[2].y == pytest.approx([0.1, 0.9])


def training_of(data_name="fashion-mini", seed=0, **settings):
    (arm,) = experiment_named("ensemble").arms("quick")
    torch.manual_seed(seed)
    trial = Trial("ensemble", arm._replace(settings={**arm.settings, **settings}), seed, "quick", data_name)
    return EXPERIMENT.training(trial)


def test_members_are_varied_as_their_settings_say():
    nets = training_of().model.members
    assert len(nets) == 6
    for net, varied in zip(nets, MEMBERS, strict=True):
        first = net.stem.second.layer.weight  # 8 channels, 3x3, He's initialization
        assert float(first.detach().std()) == pytest.approx(varied["conv_weights"] * (2 / 72) ** 0.5, rel=0.1)
        assert getattr(net.dropout, "p", 0.0) == varied["dropout"]
        norms = [[type(m) for m in part.modules() if hasattr(m, "running_mean")] for part in (net.blocks[-1], net)]
        assert set(norms[0]) == {nk.PositionBatchNorm2d if varied["per_activation"] else nk.BatchNorm2d}
        assert norms[1].count(nk.PositionBatchNorm2d) == len(norms[0]) * varied["per_activation"]
    last = nets[3].blocks[-1].branches["3x3"][1].norm
    assert (tuple(last.weight.shape), last.activation) == ((24, 2, 2), "relu")
    assert not any(module._forward_pre_hooks for module in nets[3].modules())
    starts = [net.stem.second.layer.weight / varied["conv_weights"] for net, varied in zip(nets, MEMBERS, strict=True)]
    assert not any(torch.allclose(starts[i], starts[j]) for i in range(6) for j in range(i))


def test_every_member_has_an_order_of_its_own_that_continues_where_it_stopped():
    training = training_of()
    stream = training.batches(0)
    images, labels = next(stream)
    assert images.shape == (6, 32, 1, 24, 24)
    assert len({tuple(row.tolist()) for row in labels}) == 6
    assert all(torch.equal(*pair) for pair in zip(next(stream), next(training.batches(1)), strict=True))
    other = next(training_of(seed=1).batches(0))[1]
    assert not {tuple(row.tolist()) for row in labels} & {tuple(row.tolist()) for row in other}


def test_a_member_is_trained_as_if_alone():
    whole, single = (training_of(members=[MEMBERS[0], MEMBERS[3]]) for _ in range(2))
    alone = single.model.members[1]
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    stream = whole.batches(0)
    for _ in range(3):
        x, y = next(stream)
        for optimizer, loss in (
            (whole.optimizer, sum_of_losses(whole.model(x), y)),
            (sgd, nn.functional.cross_entropy(alone(x[1]), y[1])),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for one, other in zip(whole.model.members[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Fixed(nn.Module):
    """Two members whose answers depend on the brightness of what they see."""

    def forward(self, x):
        bright = x.mean((1, 2, 3))
        one = torch.stack([bright, *[torch.full_like(bright, -float(i)) for i in range(1, 7)]], 1)
        return torch.stack([one, one.flip(1)])


def test_accuracies_count_who_is_right():
    pixels = torch.full((4, 1, 28, 28), 1, dtype=torch.uint8)
    labels = torch.tensor([0, 6, 1, 5])
    found = _accuracies(Fixed(), Images(pixels, labels), lambda pixels: pixels.float() * 5, 24, 10)
    # The first ranks 0, 1, ... 6; the second 6, 5, ... 0.
    assert [found[key(f"member {i}", 1, 10)] for i in (1, 2)] == [0.25, 0.25]
    assert [found[key(f"member {i}", 5, 10)] for i in (1, 2)] == [0.5, 0.5]
    assert found[key("ensemble", 5, 10)] == 1.0


def test_large_sets_are_trained_on_for_longer(monkeypatch):
    small = data.load("fashion-mini")
    short = training_of().steps
    times = 6
    large = data.DataSet(
        "large",
        small.classes,
        Images(small.train.pixels.repeat(times, 1, 1, 1), small.train.labels.repeat(times)),
        small.test,
    )
    monkeypatch.setattr(data, "load", lambda name: large)
    assert training_of().steps == TIMES * short


@pytest.mark.deep
def test_a_quick_trial_has_ten_crops_half_way_and_at_the_end(tmp_path):
    experiment = experiment_named("ensemble")
    trial = Trial("ensemble", experiment.arms("quick")[0], 0, "quick", "fashion-mini")
    run_trial(experiment, trial, RunOptions(tmp_path), lambda *step: None)
    found = read_trial(trial_paths(trial, tmp_path)[0])
    assert found.end["step"] == 20
    is_at_chance = found.measured[-1]["accuracy"] <= 1.2 / 10
    assert found.end["status"] == ("diverged" if is_at_chance else "done")  # 20 steps may leave it there
    assert found.series(key("ensemble", 1, 1))[0] == [0, 10, 20]
    assert found.series(key("member 6", 5, 10))[0] == [10, 20]
    assert found.measured[-1]["accuracy"] == found.measured[-1][key("ensemble", 1, 1)]
