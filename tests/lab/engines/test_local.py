"""Trials in processes of this machine: a failure is named, and nothing is left of a run that was killed."""

import multiprocessing
import os
from types import SimpleNamespace

import pytest

from normkit.lab import experiments, runner
from normkit.lab.engines import TrialError, local
from normkit.lab.plan import RunPlan
from normkit.lab.progress import Progress
from normkit.lab.trial import RunOptions
from support import toy as toy_module

PLAN = RunPlan("toy", "quick", "none", 2)


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(experiments.NAMES, "toy", toy_module.__name__)


class Messages:
    """Those that workers would send."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def get(self, timeout):
        return self.messages.pop(0)

    def put(self, message):
        self.messages.append(message)


def test_a_trial_that_fails_is_named():
    trial = PLAN.trials()[0]
    with pytest.raises(TrialError, match=r"toy\.adam\.0 failed: out of luck"):
        local._listen(Messages(("failed", trial, "out of luck")), [], 1, Progress(quiet=True))


@pytest.mark.deep
def test_a_trial_that_fails_in_a_worker_is_named(tmp_path):
    """Workers are new processes, where the toy is not registered."""
    with pytest.raises(TrialError, match=r"toy\.\w+\.0 failed: There is no experiment 'toy'"):
        runner.run(PLAN._replace(seeds=1), RunOptions(tmp_path), jobs=2)


def test_a_worker_ends_with_its_parent(monkeypatch):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    messages, trial = Messages(), PLAN.trials()[0]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getppid()))
    local._WorkerNotify(messages, trial)(1, 2, None)
    assert messages.messages == [("step", trial, 1, 2, None)]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=-1))
    orphan = local._WorkerNotify(messages, trial)
    with pytest.raises(SystemExit):
        orphan(1, 2, None)
