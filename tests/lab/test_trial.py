"""A trial's record is a function of the trial: not of when it was stopped, nor of how often."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from normkit.json_lines import LineWriter, RecordError
from normkit.lab.record import read_trial, without_times
from normkit.lab.trial import RunOptions, run_trial, trial_paths
from support.toy import Toy, trial_of

LONG = 200  # steps: more than are taken between ten kills


def quiet(*step):
    pass


def lines_of(path):
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def run_whole(trial, directory, steps=60):
    run_trial(Toy(steps), trial, RunOptions(directory), quiet)
    return lines_of(trial_paths(trial, directory)[0])


@pytest.mark.parametrize("arm", ["adam", "sgd"])
def test_the_same_trial_gives_the_same_record(arm, tmp_path):
    one = run_whole(trial_of(arm), tmp_path / "one")
    torch.randn(5)  # whatever the caller's random state is
    assert run_whole(trial_of(arm), tmp_path / "other") == one
    assert run_whole(trial_of(arm, seed=1), tmp_path / "seed")[1:] != one[1:]


def test_the_callers_random_state_is_left_alone(tmp_path):
    before = torch.get_rng_state()
    run_whole(trial_of("adam"), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def slow_run(directory, arm):
    run_trial(Toy(LONG, pause=lambda: time.sleep(0.004)), trial_of(arm), RunOptions(directory, resume=True), quiet)


@pytest.mark.parametrize("arm", ["adam", pytest.param("sgd", marks=pytest.mark.deep)])
def test_killed_ten_times_it_ends_with_the_unbroken_record(arm, tmp_path):
    expected = run_whole(trial_of(arm), tmp_path / "unbroken", LONG)
    directory, record = tmp_path / "broken", trial_paths(trial_of(arm), tmp_path / "broken")[0]
    context, kills = multiprocessing.get_context("fork"), 0
    while not (record.exists() and read_or_none(record)):
        process = context.Process(target=slow_run, args=(directory, arm))
        process.start()
        if kills < 10:
            time.sleep(random.uniform(0.0, 0.12))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        process.join(60)
        assert process.exitcode is not None, "it hangs"
    assert kills == 10
    assert lines_of(record) == expected


def read_or_none(record):
    try:
        return read_trial(record).end
    except RecordError:
        return None


def test_an_ended_trial_is_left_alone(tmp_path):
    trial = trial_of("sgd")
    run_whole(trial, tmp_path)
    record = trial_paths(trial, tmp_path)[0]
    before = record.read_bytes()
    run_trial(Toy(), trial, RunOptions(tmp_path, resume=True), quiet)
    assert record.read_bytes() == before


def test_divergence_is_a_result(tmp_path):
    run_whole(trial_of("explodes"), tmp_path)
    end = read_trial(trial_paths(trial_of("explodes"), tmp_path)[0]).end
    assert end["status"] == "diverged"
    assert "loss is" in end["why"]


def test_chance_level_is_a_divergence(tmp_path):
    toy = Toy()
    training = toy.training
    toy.training = lambda trial: replace_chance(training(trial))
    run_trial(toy, trial_of("sgd"), RunOptions(tmp_path), quiet)
    end = read_trial(trial_paths(trial_of("sgd"), tmp_path)[0]).end
    assert (end["status"], "chance" in end["why"]) == ("diverged", True)


def replace_chance(training):
    training.chance = 1.0
    return training


def test_a_divergence_is_found_by_a_resumed_run_that_writes_the_last_line(tmp_path, monkeypatch):
    toy, trial = Toy(), trial_of("sgd")
    training = toy.training
    toy.training = lambda trial: replace_chance(training(trial))
    write = LineWriter.write

    def killed_before_the_end(self, line):
        if "status" in line:
            raise KeyboardInterrupt
        return write(self, line)

    with monkeypatch.context() as killed:
        killed.setattr(LineWriter, "write", killed_before_the_end)
        with pytest.raises(KeyboardInterrupt):
            run_trial(toy, trial, RunOptions(tmp_path), quiet)
    run_trial(toy, trial, RunOptions(tmp_path, resume=True), quiet)
    assert read_trial(trial_paths(trial, tmp_path)[0]).end["status"] == "diverged"


def test_a_checkpoint_of_another_trial_is_refused(tmp_path):
    trial = trial_of("sgd")
    stopped = Toy(pause=stop_after(25))
    with pytest.raises(KeyboardInterrupt):
        run_trial(stopped, trial, RunOptions(tmp_path), quiet)
    other = trial._replace(arm=trial.arm._replace(settings={"rate": 0.2}))
    with pytest.raises(RecordError, match="another trial: its settings differ"):
        run_trial(Toy(), other, RunOptions(tmp_path, resume=True), quiet)


def stop_after(steps):
    left = iter(range(steps))

    def pause():
        if next(left, None) is None:
            raise KeyboardInterrupt

    return pause


def test_an_update_of_its_own_takes_the_place_of_the_step(tmp_path):
    toy, calls = Toy(), []
    training = toy.training

    def with_update(trial):
        found = training(trial)
        found.update = lambda x, y: calls.append((x.shape, y.shape, found.optimizer.param_groups[0]["lr"])) or 0.25
        return found

    toy.training = with_update
    run_trial(toy, trial_of("adam"), RunOptions(tmp_path), quiet)
    _, start, *lines, _ = lines_of(trial_paths(trial_of("adam"), tmp_path)[0])
    assert [call[:2] for call in calls] == [((16, 4), (16,))] * 60
    assert [call[2] for call in calls] == pytest.approx([0.01 * 0.99**step for step in range(60)])
    assert {line["loss"] for line in lines} == {0.25}
    assert {line["accuracy"] for line in lines} == {start["accuracy"]}  # the model was left alone


def test_progress_is_reported(tmp_path):
    steps = []
    run_trial(Toy(), trial_of("sgd"), RunOptions(tmp_path), lambda *step: steps.append(step))
    assert [step for step, _, _ in steps] == list(range(1, 61))
    assert steps[-1][2] > 0.34


@pytest.mark.parametrize(
    ("arm", "steps"), [("adam", 0), ("adam", 1), ("sgd", 9), ("sgd", 10), ("sgd", 11), ("adam", 59)]
)
def test_stopped_after_any_step_it_is_resumed(arm, steps, tmp_path):
    trial = trial_of(arm)
    with pytest.raises(KeyboardInterrupt):
        run_trial(Toy(pause=stop_after(steps)), trial, RunOptions(tmp_path / "stopped"), quiet)
    run_trial(Toy(), trial, RunOptions(tmp_path / "stopped", resume=True), quiet)
    assert lines_of(trial_paths(trial, tmp_path / "stopped")[0]) == run_whole(trial, tmp_path / "whole")


def test_probes_are_recorded_with_what_is_measured(tmp_path):
    _, start, *lines, _ = run_whole(trial_of("sgd"), tmp_path)
    assert (start["step"], "probes" in start) == (0, False)
    for line in lines:
        kinds = {record["probe"] for record in line["probes"]}
        assert kinds == {"ActivationMoments", "StatisticsNoise", "EffectiveRate", "Landscape"}
        assert {record["step"] for record in line["probes"]} == {line["step"] - 1}
