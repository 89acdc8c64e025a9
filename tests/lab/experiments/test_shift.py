"""The verdict follows from the records; images are shifted as a shift says; nothing of the model is changed."""

import copy
from pathlib import Path

import pytest
import torch

import normkit as nk
from normkit.lab import data
from normkit.lab.experiment import Trial
from normkit.lab.experiments import shift
from normkit.lab.experiments.shift import (
    EXPERIMENT,
    SHIFTS,
    Shifted,
    added,
    costs,
    middle,
    recovers_enough,
    shares,
    shifted_pixels,
)
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial

ARMS = {arm.name: arm for arm in EXPERIMENT.arms("quick")}


def trial(arm, seed, cost=0.3, share=0.8, more=0.01, status="done"):
    """A trial with an accuracy of 0.9, each shift at this cost, of which adabn recovers a share, and tent more."""
    header = {"experiment": "shift", "arm": arm, "seed": seed, "scale": "desk", "settings": {"few": [8, 32]}}
    found = {"as_it_is": 0.9 - cost}
    if arm == "batch":
        adabn = 0.9 - cost + share * cost
        found |= {"adabn": adabn, "tent": adabn + more, "few": [0.5, 0.6]}
        found |= {"adabn_rolled_back": False, "tent_rolled_back": False}
    line = {"step": 1500, "seconds": 1.0, "loss": 0.3, "accuracy": 0.9, "shifts": dict.fromkeys(SHIFTS, found)}
    return TrialRecord(Path(), header, [line], {"status": status} if status else None)


def run_of(*seeds, **all_alike):
    """Three seeds: as the keywords say for all, or as each dictionary says for one."""
    seeds = seeds or ({},) * 3
    return Run(
        Path(), [trial(arm, i, **(all_alike | seed)) for i, seed in enumerate(seeds) for arm in ("batch", "group")]
    )


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of(), "supported"),
        (run_of(cost=0.04), "contradicted"),
        (run_of({}, {}, {"cost": 0.04}), "unclear"),
        (run_of(share=0.5), "supported"),
        (run_of(share=0.4), "unclear"),
        (run_of(share=0.2), "contradicted"),
        (run_of({}, {"share": 0.2}, {}), "unclear"),
        (run_of(more=0.0), "contradicted"),
        (run_of({}, {"more": -0.01}, {}), "unclear"),
        (run_of(status=None), "unclear"),
        (Run(Path(), [t for t in run_of().trials if t.arm == "batch"]), "unclear"),
    ],
)
def test_the_verdict(run, outcome):
    assert EXPERIMENT.findings(run).outcome == outcome


def test_costs_and_shares():
    one = trial("batch", 0, cost=0.2, share=0.75, more=-0.02)
    assert costs(one) == pytest.approx(dict.fromkeys(SHIFTS, 0.2))
    assert shares(one, "adabn") == pytest.approx(dict.fromkeys(SHIFTS, 0.75))
    assert shares(one, "tent") == pytest.approx(dict.fromkeys(SHIFTS, 0.65))
    assert added(one) == pytest.approx(dict.fromkeys(SHIFTS, -0.02))
    assert shares(trial("batch", 0, cost=-0.1), "adabn") == {}  # nothing was lost
    assert recovers_enough(middle({})) is None


@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_images_are_images_and_depend_on_the_seed_alone(name):
    pixels = torch.randint(0, 256, (5, 3, 9, 9), dtype=torch.uint8)
    found = shifted_pixels(name, pixels, 7)
    assert found.shape == pixels.shape
    assert 0 <= found.min() < found.max() <= 255
    assert not torch.equal(found, pixels.float())
    torch.rand(1)
    assert torch.equal(shifted_pixels(name, pixels, 7), found)


def test_shifts_are_what_they_are_called():
    pixels = torch.randint(0, 256, (5, 1, 9, 9), dtype=torch.uint8)
    shifted = {name: shifted_pixels(name, pixels, 0) for name in SHIFTS}
    plain = pixels.float()
    torch.testing.assert_close(shifted["contrast"].std(), 0.3 * plain.std())
    torch.testing.assert_close(shifted["dark"].mean(), 0.3 * plain.mean())
    torch.testing.assert_close(shifted["inverted"] + plain, torch.full_like(plain, 255))
    torch.testing.assert_close(shifted["blur"][:, :, 4, 4], plain[:, :, 2:7, 2:7].mean((2, 3)))
    assert shifted["fog"].min() >= 100
    assert (shifted["noise"] - plain).std() > 20


@pytest.mark.parametrize("arm", ["batch", "group"])
def test_the_model_is_as_it_was(arm):
    found = data.load("fashion-mini")
    model = EXPERIMENT.training(Trial("shift", ARMS[arm], 0, "quick", "fashion-mini")).model.eval()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        numbers = Shifted(found, 32, 0).measure(model, arm == "batch", [8])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert list(numbers["shifts"]) == list(SHIFTS)
    assert all(("tent" in of) == (arm == "batch") for of in numbers["shifts"].values())


def test_what_is_adapted_to_is_not_measured_with(monkeypatch):
    model = EXPERIMENT.training(Trial("shift", ARMS["batch"], 0, "quick", "fashion-mini")).model.eval()
    seen = {"adapted to": set(), "measured with": set()}

    def noting(which, function, images_of):
        def noted(*args):
            seen[which] |= {image.numpy().tobytes() for image in images_of(args)}
            return function(*args)

        return noted

    monkeypatch.setattr(nk, "adapt", noting("adapted to", nk.adapt, lambda args: torch.cat(args[1])))
    monkeypatch.setattr(shift, "accuracy", noting("measured with", shift.accuracy, lambda args: args[1]))
    with torch.no_grad():
        Shifted(data.load("fashion-mini"), 32, 0).measure(model, True, [8])
    assert len(seen["adapted to"]) == 32 * len(SHIFTS)
    assert len(seen["measured with"]) == 32 * (len(SHIFTS) + 1)
    assert not seen["adapted to"] & seen["measured with"]


def test_a_quick_trial_measures_everything_at_its_end(tmp_path):
    one = Trial("shift", ARMS["batch"], 0, "quick", "fashion-mini")
    run_trial(EXPERIMENT, one, RunOptions(tmp_path / "unbroken"), lambda *_: None)
    (found,) = read_run(tmp_path / "unbroken").trials
    assert [line["step"] for line in found.measured] == [20]
    assert set(found.measured[0]["shifts"]) == set(SHIFTS)
    assert EXPERIMENT.findings(read_run(tmp_path / "unbroken")).outcome == "unclear"
