"""What probes recorded is read as it was written, and seeds are compared one by one."""

import math
from pathlib import Path
from statistics import median

import pytest

from normkit.json_lines import LineWriter
from normkit.lab.probed import (
    agreed,
    has_diverged,
    known,
    paired,
    probe_median,
    probe_values,
    ratios,
    settled_accuracy,
    with_medians,
)
from normkit.lab.record import Run, TrialRecord, read_trial
from normkit.lab.summaries import curve_over_seeds


def reading(step, layer, probe="Shift", **numbers):
    return {"step": step - 1, "probe": probe, "layer": layer, **numbers}


LINES = [
    {"step": 0, "loss": None, "accuracy": 0.1},
    {"step": 5, "loss": 2.0, "accuracy": 0.3, "probes": [reading(5, "a", x=1.0), reading(5, "b", x=None, y=4.0)]},
    {
        "step": 10,
        "loss": 1.0,
        "accuracy": 0.5,
        "probes": [reading(10, "a", x=3.0), reading(10, "b", x=8.0, y=2.0), reading(10, "a", "Other", x=99.0)],
    },
]


def trial(arm="one", seed=0, lines=LINES, status="done"):
    return TrialRecord(Path(), {"arm": arm, "seed": seed}, lines, {"status": status} if status else None)


def test_values_are_those_of_one_probe_with_the_steps_of_their_lines():
    assert list(probe_values(trial(), "Shift", "x")) == [(5, 1.0), (10, 3.0), (10, 8.0)]
    assert list(probe_values(trial(), "Other", "x")) == [(10, 99.0)]
    assert list(probe_values(trial(), "Shift", "x", lambda step: step > 5)) == [(10, 3.0), (10, 8.0)]
    assert list(probe_values(trial(), "Shift", "z")) == []
    total = lambda record: record["x"] + record["y"] if record.get("x") and record.get("y") else None  # noqa: E731
    assert list(probe_values(trial(), "Shift", total)) == [(10, 10.0)]


def test_infinity_is_kept_and_what_is_not_a_number_left_out(tmp_path):
    with LineWriter(tmp_path / "record.jsonl") as writer:
        writer.write({"experiment": "toy", "arm": "one", "seed": 0})
        values = [math.inf, math.nan, 2.0, -math.inf]
        writer.write({"step": 5, "probes": [reading(5, "a", x=value) for value in values]})
    found = read_trial(tmp_path / "record.jsonl")
    assert [value for _, value in probe_values(found, "Shift", "x")] == [math.inf, 2.0, -math.inf]


def test_medians_are_over_layers_and_steps():
    assert probe_median(trial(), "Shift", "x") == median([1, 3, 8])
    assert probe_median(trial(), "Shift", "x", lambda step: step == 10) == 5.5
    assert probe_median(trial(), "Shift", "z") is None


def test_medians_over_layers_become_part_of_the_lines():
    found = with_medians(trial(), "Shift", {"far": "x", "y": "y"})
    assert found.series("far") == ([5.0, 10.0], [1.0, 5.5])
    assert found.series("y") == ([5.0, 10.0], [4.0, 2.0])
    assert found.series("accuracy") == trial().series("accuracy")
    assert all("far" not in line for line in LINES)  # the record itself is as it was
    some = with_medians(trial(), "Shift", {"far": "x"}, lambda step: step == 5)
    assert [line["step"] for line in some.measured] == [5]
    doubled = [LINES[0], *({**line, "probes": [{**r, "x": 2.0} for r in line["probes"]]} for line in LINES[1:])]
    seeds = [with_medians(of, "Shift", {"far": "x"}) for of in (trial(), trial(seed=1, lines=doubled))]
    curve = curve_over_seeds("one", seeds, "far")
    assert (curve.x, curve.y, curve.low, curve.high) == ([5.0, 10.0], [1.5, 3.75], [1.0, 2.0], [2.0, 5.5])


def test_the_end_is_the_median_of_the_last_accuracies():
    accuracies = [0.9, 0.5, 0.8, 0.6]
    lines = [{"step": step, "accuracy": value} for step, value in enumerate(accuracies)]
    assert settled_accuracy(trial(lines=lines)) == 0.6
    assert settled_accuracy(trial(lines=lines), count=4) == pytest.approx(0.7)
    assert settled_accuracy(trial(lines=lines[:1])) == 0.9
    assert settled_accuracy(trial(lines=lines, status="diverged")) == 0.0
    assert settled_accuracy(trial(lines=[])) == 0.0
    assert settled_accuracy(trial(lines=[{"step": 1, "accuracy": 0.9, "other": 0.2}]), "other") == 0.2


def test_trials_are_paired_by_seed_when_both_have_ended():
    trials = [trial("one", seed) for seed in (2, 0, 1)]
    trials += [trial("other", 1), trial("other", 2, status="diverged"), trial("other", 0, status=None)]
    pairs = paired(Run(Path(), trials), "one", "other")
    assert [(a.arm, a.seed, b.arm, b.seed) for a, b in pairs] == [("one", 1, "other", 1), ("one", 2, "other", 2)]
    assert [has_diverged(b) for _, b in pairs] == [False, True]


def test_ratios_are_open_where_a_trial_diverged_or_has_nothing():
    def of(value, **options):
        return trial(lines=[{"step": 1, "probes": [reading(1, "a", x=value)]}], **options)

    pairs = [
        (of(3.0), of(2.0)),
        (of(3.0, status="diverged"), of(2.0)),
        (of(3.0), of(2.0, status="diverged")),
        (of(None), of(2.0)),
        (of(3.0), of(None)),
        (of(3.0), of(0.0)),
        (of(math.inf), of(2.0)),
        (of(3.0), of(math.inf)),
    ]
    found = ratios(pairs, lambda trial: probe_median(trial, "Shift", "x"))
    assert found == [1.5, None, None, None, None, None, math.inf, None]


def test_what_is_missing_is_not_known():
    assert known([1.0, None, 0.0]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([True, True], True),
        ([False], False),
        ([True, False], None),
        ([True, None], None),
        ([None, None], None),
        ([], None),
    ],
)
def test_what_seeds_agree_on(answers, said):
    assert agreed(answers) is said
