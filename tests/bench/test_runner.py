import json
import os
import sys

import pytest

from normkit.bench import BenchmarkError, Effort, Plan, choose, record, run, using_instruction_set
from normkit.bench.case import Result
from normkit.bench.cases import case_id
from normkit.bench.machine_load import Neighbours, is_crowded
from normkit.errors import BackendError
from normkit.kernels import core
from support.instruction_sets import runnable

EFFORT = Effort(rounds=2, model_rounds=2, compiles=False)
PLAN = Plan(choose(["small/BN + ReLU*"])[:2], [1], EFFORT)  # forward, and training


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Another program in the worker's place."""

    def replace(code):
        script = tmp_path / "worker.sh"
        script.write_text(f"#!/bin/sh\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


def test_memory_is_kept_mapped_unless_malloc_is_to_be_left_alone():
    assert PLAN.environ()["MALLOC_MMAP_MAX_"] == "0"
    assert PLAN.environ()["MALLOC_TRIM_THRESHOLD_"] == "17179869184"
    untouched = Plan(PLAN.cases, [1], EFFORT, "default").environ()
    assert {k: v for k, v in untouched.items() if k.startswith("MALLOC_")} == {
        k: v for k, v in os.environ.items() if k.startswith("MALLOC_")
    }


def test_a_run_has_a_process_for_each_number_of_threads(worker):
    line = '{"family": "small", "name": "x", "threads": 1, "seconds": {}, "ratios": {}, "multiples": {}}'
    worker(f"echo '{line}'; echo '{line}'")
    assert len(list(run(Plan(PLAN.cases, [1, 2, 3], EFFORT)))) == 6


def test_what_is_done_is_not_measured_again(worker, tmp_path):
    line = '{"family": "small", "name": "x", "threads": 1, "seconds": {}, "ratios": {}, "multiples": {}}'
    worker(f"echo \"$4\" >> {tmp_path}/jobs; echo '{line}'")
    forward, training = map(case_id, PLAN.cases)
    plan = Plan(PLAN.cases, [1, 2, 3], EFFORT)
    done = {(forward, 1), (training, 1), (training, 2), (forward, 3)}
    assert len(list(run(plan, done))) == 2
    jobs = [json.loads(job) for job in (tmp_path / "jobs").read_text().splitlines()]
    assert [(job["threads"], job["cases"]) for job in jobs] == [(2, [forward]), (3, [training])]


def test_the_instruction_set_is_that_of_the_measuring_processes():
    chosen = Plan(PLAN.cases, [1], EFFORT, isa="avx2")
    assert chosen.environ()["NORMKIT_INSTRUCTION_SET"] == "avx2"
    assert chosen.settings()["isa"] == "avx2"
    assert PLAN.environ().get("NORMKIT_INSTRUCTION_SET") == os.environ.get("NORMKIT_INSTRUCTION_SET")


@pytest.mark.skipif(core.WHY_NOT is not None, reason="normkit was built without its C++ core")
def test_the_instruction_set_is_this_processs_too_until_the_run_is_over():
    before = core.instruction_set()
    for name in runnable():
        with using_instruction_set(name):
            assert core.instruction_set() == name
            assert record(PLAN, [], complete=True)["environment"]["kernels"]["instruction set"] == name
        assert core.instruction_set() == before
        with pytest.raises(KeyboardInterrupt), using_instruction_set(name):
            raise KeyboardInterrupt
        assert core.instruction_set() == before
    with using_instruction_set(None):
        assert core.instruction_set() == before


def test_an_instruction_set_that_cannot_be_used_is_refused(monkeypatch):
    monkeypatch.setattr(core, "WHY_NOT", "it was left out")
    with pytest.raises(BackendError, match="no loops to choose from: it was left out"), using_instruction_set("avx2"):
        pytest.fail("ran all the same")


def test_a_worker_that_dies_is_an_error_and_keeps_what_was_measured(worker):
    line = '{"family": "small", "name": "x", "threads": 1, "seconds": {}, "ratios": {}, "multiples": {}}'
    worker(f"echo '{line}'; echo 'some trouble' >&2; kill -SEGV $$")
    results = run(PLAN)
    assert next(results) == Result("small", "x", 1)
    with pytest.raises(BenchmarkError, match=r"ended in 'small/BN \+ ReLU 32,64', with code -11: some trouble"):
        next(results)


def test_a_run_that_is_left_leaves_no_process(worker, tmp_path):
    line = '{"family": "small", "name": "x", "threads": 1, "seconds": {}, "ratios": {}, "multiples": {}}'
    worker(f"echo $$ > {tmp_path}/pid; echo '{line}'; exec sleep 60")
    results = run(PLAN)
    next(results)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_record_says_where_and_how():
    document = record(PLAN, [Result("small", "x", 1)], complete=True)
    assert document.keys() == {"date", "environment", "settings", "complete", "cases", "summary"}
    assert document["environment"]["allocator"]["MALLOC_MMAP_MAX_"] == "0"
    assert document["environment"].keys() >= {"normkit", "torch", "python", "cpu", "cores", "kernels", "platform"}
    assert document["settings"] == {
        "threads": [1],
        "allocator": {
            "name": "keep",
            "environment": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"},
        },
        "isa": None,
        "rounds": 2,
        "model_rounds": 2,
        "compiles": False,
    }


def test_neighbours_are_what_the_system_counts_beyond_ourselves(tmp_path, monkeypatch):
    stat, clock, own = tmp_path / "stat", [0.0], [0.0]
    monkeypatch.setattr("normkit.bench.machine_load.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("normkit.bench.machine_load.os.times", lambda: (own[0], 0.0, 0.0, 0.0, 0.0))
    second = os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0")
    neighbours = Neighbours(stat)
    clock[0], own[0] = 2.0, 1.0
    # Of two seconds on two cores: 2.5 s of users, 1 s idle, 0.5 s waiting, and guests already counted with the users.
    stat.write_text(f"cpu  {2 * second} {second // 2} 0 {second} {second // 2} 0 0 0 {second} 0\ncpu0 0")
    assert neighbours.busy_cores() == pytest.approx(0.75)
    assert Neighbours(tmp_path / "absent").busy_cores() is None


def test_a_machine_is_crowded_when_threads_and_neighbours_need_more_cores_than_there_are(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert is_crowded(2, 0.9)
    assert not is_crowded(2, 0.1)
    assert not is_crowded(1, 0.9)
    assert not is_crowded(2, None)
