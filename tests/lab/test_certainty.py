"""How sure a verdict is follows from the records of each seed alone, and from the plan."""

import sys
from types import SimpleNamespace

import pytest

from normkit.lab import experiments
from normkit.lab.certainty import Certainty, certainty_of
from normkit.lab.findings import Findings
from normkit.lab.plan import RunPlan
from normkit.lab.record import Run
from support import report_samples
from support.toy import Toy

SAME = ("supported",) * 3


@pytest.mark.parametrize(
    ("certainty", "text"),
    [
        (Certainty(SAME, 6, 6), "the same in 3 of 3 seeds alone"),
        (Certainty((*SAME[:2], "unclear"), 6, 6), "the same in 2 of 3 seeds alone, unclear in 1"),
        (Certainty(("unclear", "unclear"), 4, 4), "the same in 0 of 2 seeds alone, unclear in 2"),
        (
            Certainty(("contradicted", "supported", "unclear", "unclear"), 4, 4),
            "the same in 1 of 4 seeds alone, contradicted in 1, unclear in 2",
        ),
        (Certainty(SAME[:1], 2, 2), "one seed"),
        (Certainty(SAME[:1], 2, 6), "incomplete: 2 of 6 trials have ended"),
    ],
)
def test_it_is_said_in_words(certainty, text):
    assert certainty.text("supported") == text


class Judge(Toy):
    """Supported where the first seed is among the records, and unclear otherwise."""

    name = "judge"

    def findings(self, run):
        outcome = "supported" if any(trial.seed == 0 for trial in run.trials) else "unclear"
        return Findings(self.claim, self.source, outcome, [])


@pytest.fixture(autouse=True)
def judge(monkeypatch):
    monkeypatch.setitem(sys.modules, "judge", SimpleNamespace(EXPERIMENT=Judge()))
    monkeypatch.setitem(experiments.NAMES, "judge", "judge")


def run_of(seeds, end):
    trials = [
        report_samples.trial(arm.name, seed, end, arm.settings) for seed in seeds for arm in Judge().arms("quick")
    ]
    for trial in trials:
        trial.header["experiment"] = "judge"
    return Run(trials[0].path, trials)


def test_every_seed_is_judged_alone():
    run = run_of([2, 0, 1], {"status": "diverged"})
    found = certainty_of(run, RunPlan("judge", "quick", seeds=3))
    assert found == Certainty(("supported", "unclear", "unclear"), 9, 9)


def test_trials_are_counted_against_the_plan_of_a_set(monkeypatch):
    monkeypatch.setitem(experiments.SETS, "both", ("judge", "inception"))
    done = run_of([0], {"status": "done"})
    assert certainty_of(done, RunPlan("both", "desk")) == Certainty(("supported",), 3, 9)  # its own number of seeds
    assert certainty_of(run_of([0], None), RunPlan("both", "desk", seeds=1)).ended == 0
