import json
import os
import threading

import pytest

from normkit.bench import Effort, Plan, Progress, Result, choose
from normkit.bench.cases import case_id
from normkit.errors import ArgumentError

EFFORT = Effort(rounds=2, model_rounds=2, compiles=False)
CASES = choose(["small/BN 32,64", "masks/*evaluation 32,64,28,28", "batch/BN 256,512"])
PLAN = Plan(CASES, [1, 2], EFFORT)


def result(case, threads=1, **fields):
    return Result(case.family, case.name, threads, case.facts(), **fields)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results.json"


def test_every_result_is_on_the_disk_as_soon_as_it_is_there(out):
    progress = Progress(PLAN, out)
    for number, case in enumerate(CASES, start=1):
        progress.add(result(case))
        document = json.loads(out.read_text())
        assert len(document["cases"]) == len(progress) == number
        assert not document["complete"]
    progress.write(complete=True)
    assert json.loads(out.read_text())["complete"]


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = Progress(PLAN)
    progress.add(result(CASES[0]))
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_gets_the_whole_document_at_the_end_and_stays_a_pipe(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    progress = Progress(PLAN, pipe)
    progress.add(result(CASES[0]))  # would wait for a reader for ever
    reader.start()
    progress.write(complete=True)
    reader.join(timeout=20)
    assert json.loads(read[0])["complete"]
    assert pipe.is_fifo()


def test_a_run_goes_on_where_it_was_interrupted(out):
    first = Progress(PLAN, out)
    first.add(result(CASES[0], rounds=7))
    first.add(result(CASES[1], threads=2))
    second = Progress(PLAN, out)
    second.resume()
    assert second.results == first.results
    assert second.done == {(case_id(CASES[0]), 1), (case_id(CASES[1]), 2)}
    assert len(second) == 2


def test_a_case_in_which_somebody_could_not_run_is_measured_again_and_replaced(out):
    progress = Progress(PLAN, out)
    progress.add(result(CASES[0], errors={"eager": "out of memory"}))
    assert progress.done == set()
    progress.add(result(CASES[0], rounds=9))
    assert [r.rounds for r in progress.results] == [9]


def test_a_file_keeps_the_cases_of_other_families(out):
    Progress(PLAN, out).add(result(CASES[0]))
    other = Progress(Plan(CASES[1:], [1], EFFORT), out)
    other.resume()
    other.add(result(CASES[1]))
    assert len(other) == 1
    assert len(json.loads(out.read_text())["cases"]) == 2


def test_results_are_told_in_the_benchmarks_order_whenever_they_came():
    progress = Progress(PLAN)
    for threads, case in ((2, CASES[0]), (1, CASES[2]), (1, CASES[0])):
        progress.add(result(case, threads))
    told = [(r.threads, f"{r.family}/{r.name}") for r in progress.ordered()]
    assert told == [(1, case_id(CASES[0])), (1, case_id(CASES[2])), (2, case_id(CASES[0]))]


def test_no_file_yet_is_a_run_from_the_start(out):
    progress = Progress(PLAN, out)
    progress.resume()
    out.touch()  # as the check for a writable file leaves it
    progress.resume()
    assert progress.results == []


def test_other_settings_cannot_be_resumed(out):
    Progress(PLAN, out).add(result(CASES[0]))
    longer = Plan(CASES, [1], Effort(rounds=25, model_rounds=2, compiles=False), isa="avx2")
    with pytest.raises(ArgumentError, match=r"differs in isa \(None, not avx2\), rounds \(2, not 25\)\. Name another"):
        Progress(longer, out).resume()


def test_another_machine_cannot_be_resumed(out):
    Progress(PLAN, out).add(result(CASES[0]))
    document = json.loads(out.read_text())
    document["environment"]["cpu"] = "another"
    out.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=r"on the same machine; .* differs in cpu \(another, not "):
        Progress(PLAN, out).resume()


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"cases": []}', '{"cases": [{"family": "x"}], "settings": {}}'])
def test_a_file_of_something_else_cannot_be_resumed_and_is_left_alone(out, text):
    out.write_text(text)
    with pytest.raises(ArgumentError, match=r"needs a file that `normkit bench --out` wrote; got .*results\.json"):
        Progress(PLAN, out).resume()
    assert out.read_text() == text


def test_resuming_needs_a_file():
    with pytest.raises(ArgumentError, match="--resume needs the file of the run to go on with; got none"):
        Progress(PLAN).resume()
