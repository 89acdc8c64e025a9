"""A trial in a process of a Ray cluster, and what becomes of trials there; clusters are in test_ray_cluster.py."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from normkit.lab import experiments
from normkit.lab.engines import TrialError, ray
from normkit.lab.engines.engine import run_named
from normkit.lab.locks import WORKERS, held
from normkit.lab.progress import Progress
from normkit.lab.record import without_times
from normkit.lab.trial import CHECKPOINTS, RunOptions, trial_paths
from support import toy as toy_module
from support.toy import Toy, trial_of

TRIALS = [trial_of(arm, seed) for seed in (0, 1) for arm in ("adam", "sgd", "explodes")]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(experiments.NAMES, "toy", toy_module.__name__)
    monkeypatch.setattr(toy_module, "EXPERIMENT", Toy(20))
    return toy_module.EXPERIMENT


class Messages(list):
    """Those that reach the process that shows the progress."""

    put_nowait = list.append


def run_on_node(trial, directory, messages=None, resume=False):
    """As the cluster does."""
    messages = Messages() if messages is None else messages
    with ray._marked(directory) as mark:
        return ray._run_on_node(trial, RunOptions(directory, resume), ray._Place(mark, Path.cwd()), messages)


def lines(trial, directory):
    return [without_times(json.loads(line)) for line in trial_paths(trial, directory)[0].read_text().splitlines()]


@pytest.mark.parametrize("trial", TRIALS[:3], ids=lambda trial: trial.arm.name)
def test_a_record_is_the_same_as_without_a_cluster(tmp_path, trial):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    run_named(trial, RunOptions(tmp_path / "here"), lambda *step: None)
    assert run_on_node(trial, tmp_path / "there") is None
    assert lines(trial, tmp_path / "there") == lines(trial, tmp_path / "here")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {WORKERS, "records", CHECKPOINTS}
    assert list((tmp_path / "there" / CHECKPOINTS).iterdir()) == []


def test_steps_are_reported(tmp_path):
    messages = Messages()
    run_on_node(TRIALS[0], tmp_path, messages)
    assert messages[-1][:3] == (TRIALS[0], 20, 20)


def test_a_trial_goes_on_when_nobody_sees_its_steps(tmp_path):
    def fail(message):
        raise ConnectionError

    assert run_on_node(TRIALS[0], tmp_path, SimpleNamespace(put_nowait=fail)) is None
    assert lines(TRIALS[0], tmp_path)[-1]["status"] == "done"


def test_a_failure_is_returned(tmp_path, toy):
    toy.pause = lambda: 1 / 0
    assert "ZeroDivisionError" in run_on_node(TRIALS[0], tmp_path)


def test_a_machine_with_another_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "_SEEN", 0.2)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    options, place = RunOptions(tmp_path / "there"), ray._Place("of here", Path.cwd())
    for mark in (None, "of there"):  # no run there, and another
        if mark:
            (tmp_path / "there" / ray.MARK).write_text(mark)
        found = ray._run_on_node(TRIALS[0], options, place, Messages())
        assert f"does not see the run's directory {tmp_path / 'there'}." in found
    assert not (tmp_path / "there" / "records").exists()


def test_a_trial_is_not_run_twice_at_a_time(tmp_path, monkeypatch):
    """The process of a trial that the cluster has given up may still be alive."""
    monkeypatch.setattr(ray, "_LOST", 0.2)
    (tmp_path / CHECKPOINTS).mkdir()
    with held(tmp_path / CHECKPOINTS / f"{TRIALS[0].name}.lock"):
        assert "Another process is writing" in run_on_node(TRIALS[0], tmp_path)
        assert run_on_node(TRIALS[1], tmp_path) is None
    assert run_on_node(TRIALS[0], tmp_path, resume=True) is None


# ---- a sweep, on a cluster that is made up


class Told(Progress):
    def __init__(self):
        super().__init__(quiet=True)
        self.said, self.ended, self.steps = [], [], []

    def say(self, text):
        self.said.append(text)

    def end(self, trial):
        self.ended.append(trial)

    def step(self, trial, *step):
        self.steps.append((trial, *step))


class Task:
    def __init__(self, trial, options, place, messages):
        self.trial, self.options = trial, options


class Cluster:
    """Ends one task at each look, as `outcome(trial, options)` says: returns, or raises what Ray would."""

    def __init__(self, monkeypatch, outcome):
        self.exceptions = pytest.importorskip("ray").exceptions
        self.outcome, self.side_by_side, self.cancelled, self.messages = outcome, 0, [], Messages()
        self.util = SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=self.near))
        queue = SimpleNamespace(
            qsize=self.messages.__len__, get_nowait_batch=self.taken, shutdown=lambda force: self.messages.clear()
        )
        monkeypatch.setattr(ray, "required", lambda *names, **extra: SimpleNamespace(Queue=lambda actor_options: queue))

    def near(self, node, soft):
        return node, soft

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, **requests):
        self.requests = requests
        return lambda function: self

    def options(self, name):
        return SimpleNamespace(remote=Task)

    def wait(self, tasks, timeout):
        self.side_by_side = max(self.side_by_side, len(tasks))
        return tasks[:1], tasks[1:]

    def get(self, task):
        return self.outcome(task.trial, task.options)

    def cancel(self, task, force):
        self.cancelled.append(task.trial)

    def taken(self, count):
        taken, self.messages[:count] = self.messages[:count], []
        return taken

    def sweep(self, progress, jobs=2, resume=False):
        found = ray._Sweep(self, 1.0, ray._Place("", Path()), RunOptions(Path("run"), resume), progress)
        try:
            found.run(TRIALS, jobs)
        finally:
            found.cancel()


def test_so_many_trials_run_side_by_side(monkeypatch):
    cluster, progress = Cluster(monkeypatch, lambda trial, options: None), Told()
    cluster.messages.append((TRIALS[0], 1, 20, None))
    cluster.sweep(progress, jobs=3)
    assert cluster.side_by_side == 3
    assert cluster.requests["num_cpus"] == 1.0
    assert progress.ended == TRIALS
    assert progress.steps == [(TRIALS[0], 1, 20, None)]
    assert cluster.cancelled == []


def test_a_lost_trial_is_resumed(monkeypatch):
    attempts = []

    def outcome(trial, options):
        attempts.append((trial.name, options.resume))
        if trial == TRIALS[1] and not options.resume:
            raise cluster.exceptions.WorkerCrashedError
        return

    cluster, progress = Cluster(monkeypatch, outcome), Told()
    cluster.sweep(progress)
    assert sorted(trial.name for trial in progress.ended) == sorted(trial.name for trial in TRIALS)
    assert [resume for name, resume in attempts if name == TRIALS[1].name] == [False, True]
    assert progress.said == ["toy.sgd.0: its process was lost; it continues from its last checkpoint"]


def test_a_trial_that_is_lost_again_and_again_is_given_up(monkeypatch):
    def outcome(trial, options):
        raise cluster.exceptions.WorkerCrashedError

    cluster, progress = Cluster(monkeypatch, outcome), Told()
    with pytest.raises(TrialError, match=r"The process of toy\.adam\.0 was lost 4 times.*Resume the run with --resume"):
        cluster.sweep(progress, jobs=1)
    assert len(progress.said) == ray.RETRIES == 3


def test_a_trial_that_fails_is_named_and_the_others_are_cancelled(monkeypatch):
    cluster = Cluster(monkeypatch, lambda trial, options: "out of luck")
    with pytest.raises(TrialError, match=r"^toy\.adam\.0 failed: out of luck$"):
        cluster.sweep(Told())
    assert cluster.cancelled == [TRIALS[1]]


class InterruptedAtItsEnd:
    """As Ray's references have it: what is raised in a destructor is dropped."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_python_drops_is_not_lost(monkeypatch):
    def outcome(trial, options):
        InterruptedAtItsEnd()

    cluster, progress = Cluster(monkeypatch, outcome), Told()
    with pytest.raises(KeyboardInterrupt):
        cluster.sweep(progress)
    assert progress.ended == TRIALS[:1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_cancels_what_runs(monkeypatch):
    def outcome(trial, options):
        raise KeyboardInterrupt

    cluster = Cluster(monkeypatch, outcome)
    with pytest.raises(KeyboardInterrupt):
        cluster.sweep(Told(), jobs=3)
    assert cluster.cancelled == TRIALS[1:3]
