"""What every experiment must bear: runs that were stopped early are reported, and decide nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from normkit.lab.experiment import Trial
from normkit.lab.experiments import NAMES, experiment_named
from normkit.lab.record import Run, TrialRecord, read_run
from normkit.lab.trial import RunOptions, run_trial


def begun(experiment, arm):
    """A trial that has written its first line."""
    header = {"experiment": experiment.name, "arm": arm.name, "seed": 0, "scale": "quick", "data": experiment.data}
    header |= {"settings": dict(arm.settings), "steps": 100, "parameters": 1000, "initial_rate": 0.1}
    return TrialRecord(Path(), header, [], None)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_has_only_begun_is_unclear(name):
    experiment = experiment_named(name)
    trials = [begun(experiment, arm) for arm in experiment.arms("quick")]
    for some in (trials[:1], trials[-1:], trials):
        assert experiment.findings(Run(Path(), some)).outcome == "unclear"


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_in_its_first_trial_or_after_it_is_unclear(name, tmp_path):
    experiment = experiment_named(name)
    first, *others = experiment.arms("quick")
    trial = Trial(name, first, 0, "quick", experiment.data)
    run_trial(experiment, trial, RunOptions(tmp_path), lambda *step: None)
    (done,) = read_run(tmp_path).trials
    for lines in range(len(done.measured) + 1):
        stopped = replace(done, measured=done.measured[:lines], end=None)
        assert experiment.findings(Run(tmp_path, [stopped])).outcome == "unclear"
    found = experiment.findings(Run(tmp_path, [done, *(begun(experiment, arm) for arm in others)]))
    assert found.outcome == "unclear" or not others
