"""Runs on real Ray clusters: the same records as without, whatever is killed, and nothing is left of one started."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from normkit.lab import runner
from normkit.lab.engines import engine_named
from normkit.lab.engines.ray_cluster import ClusterError
from normkit.lab.plan import RunPlan
from normkit.lab.record import without_times
from normkit.lab.trial import RunOptions
from support import marked_processes
from support.marked_processes import Marked, stopped

pytest.importorskip("ray")

LAB = [sys.executable, "-c", "if __name__ == '__main__': from normkit.cli.app import main; main()", "lab", "run"]
QUICK = ["sigmoid-mlp", "--scale", "quick", "--jobs", 2]
LONG = ["sigmoid-mlp", "--jobs", 2]  # far longer than a test waits
A_TRIAL = "ray::sigmoid-mlp."  # the title of a process that runs one


def lab(*arguments, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Marked([*LAB, *arguments], env=environment, **pipes)


def run_to_its_end(*arguments):
    with lab(*arguments) as command:
        code, _, err = command.ended()
    assert code == 0, err


def lines(directory):
    """All that is in the records, but for times and the commit, which may change during the tests."""
    return {
        path.name: [without_times(json.loads(line)) | {"commit": None} for line in path.read_text().splitlines()]
        for path in (directory / "records").glob("*.jsonl")
    }


@pytest.fixture
def temporary():
    """A place for temporary files with a path as short as Ray needs it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def locally(tmp_path_factory):
    """The lines of two trials that ran in processes of this machine."""
    directory = tmp_path_factory.mktemp("local") / "run"
    run_to_its_end(*QUICK, "--out", directory)
    return lines(directory)


@pytest.mark.deep
def test_records_are_the_same_on_either_engine(tmp_path, locally, temporary):
    with lab(*QUICK, "--engine", "ray", "--out", tmp_path, "--format", "json", TMPDIR=temporary) as command:
        code, out, err = command.ended()
        command.wait_until(lambda: not command.alive(), needs_main=False)
    assert code == 0, err
    assert json.loads(out)[-1] == {"report": str(tmp_path / "report.html")}
    assert lines(tmp_path) == locally
    assert sorted(line.partition(":")[0] for line in err.splitlines()) == ["sigmoid-mlp.bn.0", "sigmoid-mlp.plain.0"]
    assert list(temporary.glob("ray-*")) == []


def kill_in_a_trial(command, directory):
    """Kill a process amid a trial that has a checkpoint; return the trial's record and its first line so far."""

    def amid_a_trial():
        for process in command.alive(A_TRIAL):
            if not stopped(process):
                continue
            name = Path(f"/proc/{process}/cmdline").read_text().removeprefix("ray::").rstrip(" \0")
            record = directory / "records" / f"{name}.jsonl"
            if (directory / "checkpoints" / f"{name}.safetensors").exists():
                os.kill(process, signal.SIGKILL)
                return record, record.read_text().splitlines()[0]
            os.kill(process, signal.SIGCONT)
        return None

    return command.wait_until(amid_a_trial)


@pytest.mark.deep
def test_a_sweep_with_a_killed_process_has_all_records(tmp_path):
    sweep = [*QUICK, "--seeds", 12]
    run_to_its_end(*sweep, "--out", tmp_path / "local")
    with lab(*sweep, "--engine", "ray", "--out", tmp_path / "ray") as command:
        command.wait_until(lambda: len(lines(tmp_path / "ray")) > 6)
        record, header = kill_in_a_trial(command, tmp_path / "ray")
        code, out, err = command.ended()
    assert code == 0, err
    assert f"{record.stem}: its process was lost; it continues from its last checkpoint" in err
    assert record.read_text().splitlines()[0] == header  # of the process that was killed
    assert "The report:" in out
    assert "A worker died" not in out  # Ray's own words
    assert len(lines(tmp_path / "ray")) == 24
    assert lines(tmp_path / "ray") == lines(tmp_path / "local")


@pytest.mark.deep
def test_ctrl_c_ends_everything(tmp_path, temporary):
    with lab(*LONG, "--engine", "ray", "--out", tmp_path, TMPDIR=temporary) as command:
        command.wait_until(lambda: lines(tmp_path))
        command.main.send_signal(signal.SIGINT)
        code, _, err = command.ended()
        command.wait_until(lambda: not command.alive(), needs_main=False)
    assert code == 130, err
    assert f"to resume: normkit lab run sigmoid-mlp --engine ray --out {tmp_path} --resume" in err
    assert list(temporary.glob("ray-*")) == []


@pytest.mark.deep
def test_a_killed_run_leaves_no_process_and_is_resumed_on_the_other_engine(tmp_path, locally, temporary):
    with lab(*QUICK, "--engine", "ray", "--out", tmp_path, TMPDIR=temporary) as command:
        command.wait_until(lambda: list((tmp_path / "checkpoints").glob("*.safetensors")))
        command.main.kill()
        command.wait_until(lambda: not command.alive(), needs_main=False)
    run_to_its_end(*QUICK, "--out", tmp_path, "--resume")
    assert lines(tmp_path) == locally


# ---- a cluster that was there before

SERVE = """
import sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
print("address", ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    print("answer", ray.get(ray.remote(lambda: line.strip()).remote()), flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    """A cluster with two CPUs, with what the environment of those who use it must have."""
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory(prefix="c-", dir="/tmp", ignore_cleanup_errors=True) as directory,
        Marked([sys.executable, "-c", SERVE, directory], env=access, **pipes) as command,
    ):
        command.access = access | {"RAY_ADDRESS": answer(command, "address")}
        yield command


def answer(command, kind):
    for line in command.main.stdout:
        if line.startswith(kind):
            return line.split()[1]
    raise AssertionError("the cluster has ended")


@pytest.mark.deep
def test_a_cluster_that_exists_is_used_and_stays(tmp_path, cluster, locally):
    with lab(*QUICK, "--engine", "ray", "--out", tmp_path, **cluster.access) as command:
        command.wait_until(lambda: cluster.alive(A_TRIAL))
        code, _, err = command.ended()
    assert code == 0, err
    assert lines(tmp_path) == locally
    cluster.main.stdin.write("still-there\n")
    cluster.main.stdin.flush()
    assert answer(cluster, "answer") == "still-there"


@pytest.mark.deep
def test_more_cpus_than_a_node_has_are_refused(tmp_path, cluster):
    options = ["--engine", "ray", "--cpus-per-trial", 64, "--out", tmp_path]
    with lab(*QUICK, *options, **cluster.access) as command:
        code, _, err = command.ended()
    assert code == 2
    assert "--cpus-per-trial 64 needs a node with as many CPUs; the largest of this cluster has 2" in err


def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"  # where nothing listens from here on
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match=f"The Ray cluster at RAY_ADDRESS={address} cannot be reached: .*refused"):
        runner.run(RunPlan("sigmoid-mlp", "quick"), RunOptions(tmp_path), engine=engine_named("ray"))


IN_A_PROCESS = """
import signal, sys
from pathlib import Path
from normkit.lab import experiments, runner
from normkit.lab.engines import TrialError, engine_named, ray
from normkit.lab.plan import RunPlan
from normkit.lab.trial import RunOptions

experiments.NAMES["toy"] = "support.toy"  # here, and in no process of the cluster
handler = signal.getsignal(signal.SIGTERM)
for name in (ray.MARK, ".of-another-name"):  # then as if the directory were another
    ray.MARK = name
    try:
        runner.run(RunPlan("toy", "quick", "none", 1), RunOptions(Path(sys.argv[1], name)), engine=engine_named("ray"))
    except TrialError as error:
        print(error)
    assert not Path(sys.argv[1], name, name).exists()
assert signal.getsignal(signal.SIGTERM) == handler
"""


@pytest.mark.deep
def test_what_fails_on_a_node_is_said_as_it_is_here(tmp_path, cluster):
    command = [sys.executable, "-W", "error", "-c", IN_A_PROCESS, tmp_path]
    access = cluster.access | {"PYTHONPATH": Path(marked_processes.__file__).parents[1]}
    with Marked(command, env=access, stdout=subprocess.PIPE, text=True) as process:
        code, out, _ = process.ended()
    assert code == 0
    failed, apart = out.splitlines()
    assert re.match(r"toy\.\w+\.0 failed: There is no experiment 'toy'", failed)
    assert re.match(r"toy\.\w+\.0 failed: .* does not see the run's directory", apart)
