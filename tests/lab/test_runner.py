"""Runs: side by side or one by one, resumed, refused, and with what goes wrong said."""

import errno
import fcntl
import json

import pytest

from normkit.errors import ArgumentError
from normkit.lab import experiments, runner
from normkit.lab.record import read_run, without_times
from normkit.lab.runner import BusyError, Plan, TrialError, locked, run
from support.toy import Toy

PLAN = Plan("toy", "quick", "none", 2)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    toy = Toy(20)
    for module in (experiments, runner):
        monkeypatch.setattr(module, "experiment_named", lambda name: toy)
        monkeypatch.setattr(module, "names_in", lambda name: (name,))
    return toy


def measured(directory):
    return {
        (trial.arm, trial.seed): [without_times(line) for line in trial.measured]
        for trial in read_run(directory).trials
    }


def test_every_arm_meets_every_seed(tmp_path):
    run(PLAN, tmp_path, False, jobs=1)
    assert set(measured(tmp_path)) == {(arm, seed) for arm in ("adam", "sgd", "explodes") for seed in (0, 1)}


def test_a_set_is_run_seed_by_seed_each_experiment_with_its_own_seeds_and_data(monkeypatch):
    class Other(Toy):
        name, data, seeds = "other", "elsewhere", {"quick": 1}

    toys = {"toy": Toy(), "other": Other()}
    toys["toy"].seeds = {"quick": 2}
    monkeypatch.setattr(runner, "experiment_named", toys.__getitem__)
    monkeypatch.setattr(runner, "names_in", lambda name: ("other", "toy"))
    trials = Plan("both", "quick").trials()
    assert [(trial.experiment, trial.seed) for trial in trials[::3]] == [("other", 0), ("toy", 0), ("toy", 1)]
    assert {trial.experiment: trial.data for trial in trials} == {"other": "elsewhere", "toy": "fashion-mini"}
    assert {trial.data for trial in Plan("both", "quick", "mnist").trials()} == {"mnist"}
    assert len(Plan("both", "quick", seeds=3).trials()) == 18


def test_a_run_of_a_set_is_read_experiment_by_experiment(tmp_path):
    run(PLAN, tmp_path, False, jobs=1)
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
        run(PLAN, tmp_path, False, jobs=1, tensorboard=True)
    toy.pause = None
    run(PLAN, tmp_path, True, jobs=1, tensorboard=True)
    for trial in read_run(tmp_path).trials:
        logged = events.EventAccumulator(str(tmp_path / "tensorboard" / trial.path.stem))
        logged.Reload()
        for key in ("accuracy", "loss"):
            steps, values = trial.series(key)
            found = logged.Scalars(key) if steps else []
            assert [event.step for event in found] == steps
            assert [event.value for event in found] == pytest.approx(values)


def test_a_stopped_run_is_gone_on_with(tmp_path, toy):
    run(PLAN, tmp_path / "whole", False, jobs=1)
    calls = iter(range(50))

    def pause():
        if next(calls, None) is None:
            raise KeyboardInterrupt

    toy.pause = pause
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, tmp_path / "stopped", False, jobs=1)
    toy.pause = None
    run(PLAN, tmp_path / "stopped", True, jobs=1)
    assert measured(tmp_path / "stopped") == measured(tmp_path / "whole")


def test_a_run_is_not_overwritten(tmp_path):
    run(PLAN, tmp_path, False, jobs=1)
    with pytest.raises(ArgumentError, match="holds a run already"):
        run(PLAN, tmp_path, False, jobs=1)


@pytest.mark.parametrize(("other", "message"), [(PLAN._replace(seeds=3), "seeds 2"), (PLAN._replace(data="x"), "data")])
def test_another_run_is_not_gone_on_with(tmp_path, other, message):
    run(PLAN, tmp_path, False, jobs=1)
    with pytest.raises(ArgumentError, match=message):
        run(other, tmp_path, True, jobs=1)


def test_where_there_is_no_run_none_is_gone_on_with(tmp_path):
    with pytest.raises(ArgumentError, match="holds no run that could be resumed"):
        run(PLAN, tmp_path / "none", True, jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_written_by_one_process(tmp_path):
    with locked(tmp_path), pytest.raises(BusyError, match="Another process is writing"):
        run(PLAN, tmp_path, False, jobs=1)
    run(PLAN, tmp_path, False, jobs=1)


def test_where_a_worker_of_a_killed_run_is_left_nobody_else_writes(tmp_path):
    with (
        runner._locked(tmp_path / runner.WORKERS, fcntl.LOCK_SH),
        pytest.raises(BusyError, match="Another process is writing"),
    ):
        run(PLAN, tmp_path, False, jobs=1)
    run(PLAN, tmp_path, False, jobs=1)


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "make room and go on with --resume" in runner.disk_trouble(full)
    lines = iter(range(4))
    write = runner.run_trial.__globals__["RecordWriter"].write

    def until_full(self, line):
        if next(lines, None) is None:
            raise full
        return write(self, line)

    monkeypatch.setattr("normkit.lab.record.RecordWriter.write", until_full)
    with pytest.raises(OSError, match="No space"):
        run(PLAN, tmp_path / "full", False, jobs=1)
    monkeypatch.undo()
    toy = Toy(20)
    monkeypatch.setattr(runner, "experiment_named", lambda name: toy)
    monkeypatch.setattr(runner, "names_in", lambda name: (name,))
    run(PLAN, tmp_path / "full", True, jobs=1)
    run(PLAN, tmp_path / "whole", False, jobs=1)
    assert measured(tmp_path / "full") == measured(tmp_path / "whole")


class Said:
    """What workers would have said."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def get(self, timeout):
        return self.messages.pop(0)


def test_a_trial_that_fails_is_named(tmp_path):
    trial = PLAN.trials()[0]
    with pytest.raises(TrialError, match=r"toy\.adam\.0 failed: out of luck"):
        runner._listen(Said(("failed", trial, "out of luck")), [], 1, runner.Progress(quiet=True))


def test_the_plan_is_written_down(tmp_path):
    run(PLAN, tmp_path, False, jobs=1)
    assert json.loads((tmp_path / "run.json").read_text()) == PLAN._asdict()
