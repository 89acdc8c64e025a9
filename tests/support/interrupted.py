"""A trial that is stopped in the middle and resumed."""

import copy
import itertools
import json

import pytest

from normkit.lab.record import without_times
from normkit.lab.trial import RunOptions, run_trial, trial_paths


def assert_resumed_as_unbroken(experiment, trial, unbroken, directory, steps=9):
    """Stop a trial after some steps, resume it, and compare its record with that of a trial that was not stopped."""
    stopped, training = copy.copy(experiment), experiment.training

    def interrupted(trial):
        found = training(trial)
        batches = found.batches

        def until_then(start):
            yield from itertools.islice(batches(start), steps - start)
            raise KeyboardInterrupt

        found.batches = until_then
        return found

    stopped.training = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_trial(stopped, trial, RunOptions(directory), lambda *step: None)
    record, checkpoint = trial_paths(trial, directory)
    assert checkpoint.exists()
    run_trial(experiment, trial, RunOptions(directory, resume=True), lambda *step: None)
    ours, theirs = (
        [without_times(json.loads(line)) for line in path.read_text().splitlines()] for path in (record, unbroken.path)
    )
    assert ours == theirs
