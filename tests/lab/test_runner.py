"""Runs: side by side or one by one, resumed, refused, and with what goes wrong said."""

import errno
import json
import sys
from threading import Timer
from types import SimpleNamespace

import pytest

from normkit.errors import ArgumentError
from normkit.json_lines import LineWriter
from normkit.lab import experiments, runner
from normkit.lab.engines import disk_trouble
from normkit.lab.locks import WORKERS, BusyError, lock, locked
from normkit.lab.plan import RunPlan
from normkit.lab.record import read_run, without_times
from normkit.lab.trial import RunOptions
from support import toy as toy_module
from support.toy import Toy

PLAN = RunPlan("toy", "quick", "none", 2)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    toy = Toy(20)
    monkeypatch.setattr(toy_module, "EXPERIMENT", toy)
    monkeypatch.setitem(experiments.NAMES, "toy", toy_module.__name__)
    return toy


def run(plan, directory, resume=False, jobs=1, tensorboard=False, only=()):
    runner.run(plan, RunOptions(directory, resume, tensorboard), jobs, only=only)


def measured(directory):
    return {
        (trial.arm, trial.seed): [without_times(line) for line in trial.measured]
        for trial in read_run(directory).trials
    }


def test_every_arm_meets_every_seed(tmp_path):
    run(PLAN, tmp_path)
    assert set(measured(tmp_path)) == {(arm, seed) for arm in ("adam", "sgd", "explodes") for seed in (0, 1)}


def test_a_set_is_run_seed_by_seed_each_experiment_with_its_own_seeds_and_data(monkeypatch, toy):
    class Other(Toy):
        name, data, seeds = "other", "elsewhere", {"quick": 1}

    toy.seeds = {"quick": 2}
    monkeypatch.setitem(sys.modules, "other_toy", SimpleNamespace(EXPERIMENT=Other()))
    monkeypatch.setitem(experiments.NAMES, "other", "other_toy")
    monkeypatch.setitem(experiments.SETS, "both", ("other", "toy"))
    trials = RunPlan("both", "quick").trials()
    assert [(trial.experiment, trial.seed) for trial in trials[::3]] == [("other", 0), ("toy", 0), ("toy", 1)]
    assert {trial.experiment: trial.data for trial in trials} == {"other": "elsewhere", "toy": "fashion-mini"}
    assert {trial.data for trial in RunPlan("both", "quick", "mnist").trials()} == {"mnist"}
    assert len(RunPlan("both", "quick", seeds=3).trials()) == 18


@pytest.fixture
def both(monkeypatch):
    """A set of two."""

    class Other(Toy):
        name = "other"

    monkeypatch.setitem(sys.modules, "other_toy", SimpleNamespace(EXPERIMENT=Other(20)))
    monkeypatch.setitem(experiments.NAMES, "other", "other_toy")
    monkeypatch.setitem(experiments.SETS, "both", ("other", "toy"))
    return RunPlan("both", "quick", "none", 2)


def test_a_set_is_run_in_several_goes_and_nothing_is_run_twice(tmp_path, both):
    run(both, tmp_path, only=("to*",))
    first = {path.name: path.read_bytes() for path in (tmp_path / "records").iterdir()}
    assert {name.partition(".")[0] for name in first} == {"toy"}
    run(both, tmp_path, resume=True, only=("other",))
    run(both, tmp_path, resume=True)
    records = {path.name: path.read_bytes() for path in (tmp_path / "records").iterdir()}
    assert len(records) == 12
    assert {name: records[name] for name in first} == first


def test_only_some_experiments_of_a_set_are_wanted(both):
    assert {trial.experiment for trial in both.trials(["o*", "toy"])} == {"other", "toy"}
    assert {trial.experiment for trial in both.trials(["other"])} == {"other"}
    with pytest.raises(ArgumentError, match=r"got 'otter', which none matches\. Did you mean \"other\"\?"):
        both.trials(["toy", "otter"])


def test_a_run_of_a_set_is_read_experiment_by_experiment(tmp_path):
    run(PLAN, tmp_path)
    whole = read_run(tmp_path)
    for trial in whole.of("sgd"):
        trial.header["experiment"] = "other"
    parts = whole.by_experiment()
    assert [(part.header["experiment"], len(part.trials)) for part in parts] == [("toy", 4), ("other", 2)]


def test_tensorboard_shows_what_was_measured(tmp_path, toy):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    left = iter(range(45))

    def pause():
        if next(left, None) is None:
            raise KeyboardInterrupt

    toy.pause = pause
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, tmp_path, tensorboard=True)
    toy.pause = None
    run(PLAN, tmp_path, resume=True, tensorboard=True)
    for trial in read_run(tmp_path).trials:
        logged = events.EventAccumulator(str(tmp_path / "tensorboard" / trial.path.stem))
        logged.Reload()
        for key in ("accuracy", "loss"):
            steps, values = trial.series(key)
            found = logged.Scalars(key) if steps else []
            assert [event.step for event in found] == steps
            assert [event.value for event in found] == pytest.approx(values)


def test_a_stopped_run_is_resumed(tmp_path, toy):
    run(PLAN, tmp_path / "whole")
    calls = iter(range(50))

    def pause():
        if next(calls, None) is None:
            raise KeyboardInterrupt

    toy.pause = pause
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, tmp_path / "stopped")
    toy.pause = None
    run(PLAN, tmp_path / "stopped", resume=True)
    assert measured(tmp_path / "stopped") == measured(tmp_path / "whole")


def test_a_run_is_not_overwritten(tmp_path):
    run(PLAN, tmp_path)
    with pytest.raises(ArgumentError, match="holds a run already"):
        run(PLAN, tmp_path)


@pytest.mark.parametrize(("other", "message"), [(PLAN._replace(seeds=3), "seeds 2"), (PLAN._replace(data="x"), "data")])
def test_a_run_is_not_resumed_with_another_plan(tmp_path, other, message):
    run(PLAN, tmp_path)
    with pytest.raises(ArgumentError, match=message):
        run(other, tmp_path, resume=True)


def test_where_there_is_no_run_none_is_resumed(tmp_path):
    with pytest.raises(ArgumentError, match="holds no run that could be resumed"):
        run(PLAN, tmp_path / "none", resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_written_by_one_process(tmp_path):
    with locked(tmp_path), pytest.raises(BusyError, match="Another process is writing"):
        run(PLAN, tmp_path)
    run(PLAN, tmp_path)


def test_a_directory_is_not_written_while_a_worker_of_a_killed_run_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("normkit.lab.locks._DYING", 0.1)
    with open(tmp_path / WORKERS, "w") as file:
        lock(file, shared=True)  # as a worker does
        with pytest.raises(BusyError, match="Another process is writing"):
            run(PLAN, tmp_path)
    run(PLAN, tmp_path)


def test_a_worker_of_a_killed_run_is_waited_for(tmp_path):
    with open(tmp_path / WORKERS, "w") as file:
        lock(file, shared=True)
        Timer(0.3, file.close).start()
        run(PLAN, tmp_path)


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "make room and resume with --resume" in disk_trouble(full)
    lines = iter(range(4))
    write = LineWriter.write

    def until_full(self, line):
        if next(lines, None) is None:
            raise full
        return write(self, line)

    with monkeypatch.context() as small_disk:
        small_disk.setattr(LineWriter, "write", until_full)
        with pytest.raises(OSError, match="No space"):
            run(PLAN, tmp_path / "full")
    run(PLAN, tmp_path / "full", resume=True)
    run(PLAN, tmp_path / "whole")
    assert measured(tmp_path / "full") == measured(tmp_path / "whole")


def test_the_plan_is_written_down(tmp_path):
    run(PLAN, tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == PLAN._asdict()
