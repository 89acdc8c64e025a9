"""Runs that torchrun starts, kills and starts again."""

import contextlib
import json
import os
import random
import signal
import sys
import time

import pytest

from normkit.lab.record import read_run, without_times
from support import short_inception
from support.marked_processes import Marked

DEADLINE = 300.0  # seconds for a run


@contextlib.contextmanager
def torchrun(*arguments, ranks=2, restarts=0, log):
    """The script under torchrun, of which nothing is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", short_inception.__file__, *map(str, arguments)]
    environment = {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with open(log, "wb") as file, Marked(command, environment, stdout=file, stderr=file) as running:
        yield running.main


def lines(directory):
    return {
        path.name: [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        for path in sorted((directory / "records").glob("*.jsonl"))
    }


def wait_for(path, process):
    deadline = time.monotonic() + DEADLINE
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)
    return int(path.read_text())


def run_whole(directory, log):
    with torchrun(directory, 0, log=log) as process:
        assert process.wait(DEADLINE) == 0, log.read_text()[-3000:]
    return lines(directory)


@pytest.mark.deep
def test_a_rank_killed_five_times_costs_nothing_but_time(tmp_path):
    expected = run_whole(tmp_path / "whole", tmp_path / "whole.log")
    out, log = tmp_path / "broken", tmp_path / "broken.log"
    # 80 steps of 0.15 s are longer than five times 2 s: it cannot end before the last kill.
    with torchrun(out, 0.15, restarts=5, log=log) as process:
        for attempt in range(5):
            victim = wait_for(tmp_path / f"broken.{attempt}.{random.randrange(2)}.pid", process)
            time.sleep(random.uniform(0.0, 2.0))
            os.kill(victim, signal.SIGKILL)
        assert process.wait(DEADLINE) == 0, log.read_text()[-3000:]
    assert lines(out) == expected
    assert {trial.end["status"] for trial in read_run(out).trials} == {"done"}
    header = expected["inception.bn-baseline.0.jsonl"][0]
    assert (header["ranks"], header["batch"], header["micro_batches"], header["precision"]) == (2, 32, 1, "float32")
    page = (out / "report.html").read_text()
    assert "torchrun --nproc-per-node 2 -m normkit lab run inception" in page
    assert list((out / "checkpoints").iterdir()) == []
    assert log.read_text().count("The report: ") == 1  # the first rank speaks for all


@pytest.mark.deep
def test_data_that_differs_between_ranks_is_refused_and_so_is_a_run_that_is_there(tmp_path):
    for name in ("one", "other"):
        write_images(tmp_path / name / "images", extra=name == "other")
    log, out = tmp_path / "log", tmp_path / "out"
    environment = ["--data", "./images", f"folder:{tmp_path / 'other'}"]
    with chdir(tmp_path / "one"), torchrun(out, 0, *environment, log=log) as process:
        assert process.wait(DEADLINE) != 0
    assert "All ranks need the same data; rank 0 has ./images (" in log.read_text()
    assert not (out / "records").exists()

    (out / "records").mkdir(parents=True)
    with torchrun(out, 0, restarts=1, log=log) as process:  # a restart is no reason to resume what was refused
        assert process.wait(DEADLINE) != 0
    assert log.read_text().count("holds a run already") >= 2


def write_images(folder, extra):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(20 + (extra and part == "train")):
                image.new("L", (28, 28), number).save(folder / part / label / f"{number}.png")


@contextlib.contextmanager
def chdir(path):
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
