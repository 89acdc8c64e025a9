"""`normkit lab`: runs end in a report, and what cannot run is said with exit code 2."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from normkit.lab.experiments import NAMES
from normkit.lab.record import read_run, without_times

LAB = [sys.executable, "-c", "if __name__ == '__main__': from normkit.cli.app import main; main()", "lab"]
QUICK = ["run", "sigmoid-mlp", "--scale", "quick", "--seeds", "3"]


def lab(*arguments, **options):
    return subprocess.run([*LAB, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def measured(directory):
    return {
        (trial.arm, trial.seed): [*map(without_times, trial.measured), trial.end["status"]]
        for trial in read_run(directory).trials
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lab") / "run"
    return directory, lab(*QUICK, "--out", directory, "--jobs", 1)


def test_a_run_ends_with_findings_and_a_report(unbroken):
    directory, done = unbroken
    assert done.returncode == 0, done.stderr
    assert "The report:" in done.stdout
    assert "BN is ahead at" in done.stdout
    assert "sigmoid-mlp.bn.1: ended" in done.stderr
    assert (directory / "report.html").stat().st_size > 100_000
    assert set(measured(directory)) == {(arm, seed) for arm in ("plain", "bn") for seed in range(3)}


def test_a_report_is_written_again(unbroken):
    directory, _ = unbroken
    (directory / "report.html").unlink()
    done = lab("report", directory, "--format", "json")
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stdout)
    assert first["experiment"] == "sigmoid-mlp"
    assert first["outcome"] in ("supported", "contradicted", "unclear")
    assert last["report"] == str(directory / "report.html")


def lines(directory):
    """All that is in the records, but for times."""
    found = sorted((directory / "records").glob("*.jsonl"))
    return {path.name: [without_times(json.loads(line)) for line in path.read_text().splitlines()] for path in found}


def written(directory):
    return sum(path.stat().st_size for path in (directory / "records").glob("*.jsonl"))


def test_killed_ten_times_a_run_ends_with_the_unbroken_records(unbroken, tmp_path):
    directory = tmp_path / "killed"
    for kill in range(10):
        resume = ["--resume"] if kill else []
        command = [*LAB, *QUICK, "--out", str(directory), *resume]
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        before, deadline = written(directory), time.monotonic() + 60
        while written(directory) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.1))  # some of them between two lines, some while one is written
        assert process.poll() is None, "it ended before it could be killed for the tenth time"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = lab(*QUICK, "--out", directory, "--resume")
    assert done.returncode == 0, done.stderr
    assert lines(directory) == lines(unbroken[0])


def test_workers_do_not_outlive_a_killed_run(tmp_path):
    directory = tmp_path / "orphans"
    command = [*LAB, "run", "sigmoid-mlp", "--out", str(directory), "--jobs", "2"]  # far longer than the test waits
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(list((directory / "records").glob("*.jsonl"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()  # it alone
        process.wait()
        time.sleep(1.0)
        before = written(directory)
        time.sleep(1.5)
        assert written(directory) == before > 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def heed_ctrl_c():
    """What a shell starts in the background is told to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_says_how_to_go_on(tmp_path):
    directory = tmp_path / "stopped"
    command = [*LAB, "run", "sigmoid-mlp", "--out", str(directory), "--jobs", "1"]  # far longer than the test waits
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:
        try:
            while not list((directory / "records").glob("*.jsonl")):
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert f"normkit lab run sigmoid-mlp --out {directory} --resume" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "sigmoid-mpl"], "Did you mean 'sigmoid-mlp'?"),
        (["run", "sigmoid-mlp", "--scale", "desc"], "Did you mean 'desk'?"),
        (["run", "sigmoid-mlp", "--data", "fashion-mni"], "fashion-mini"),
        (["run", "sigmoid-mlp", "--seeds", "0"], "--seeds"),
        (["run", "sigmoid-mlp", "--out", "none", "--resume"], "holds no run that could be resumed"),
        (["report", "/nonexistent"], "holds no run"),
    ],
)
def test_what_cannot_run_is_said(arguments, message, tmp_path):
    done = lab(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(unbroken):
    directory, _ = unbroken
    before = measured(directory)
    done = lab(*QUICK, "--out", directory)
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
    assert measured(directory) == before


def test_another_run_is_not_gone_on_with(unbroken):
    directory, _ = unbroken
    done = lab("run", "sigmoid-mlp", "--seeds", 5, "--out", directory, "--resume")
    assert done.returncode == 2
    assert "has seeds 3: --resume goes on with just that run" in done.stderr


def test_the_experiments_are_listed():
    done = lab("list", "--format", "json")
    assert [row["name"] for row in json.loads(done.stdout)] == list(NAMES)
