import json

import pytest

from normkit.bench import BenchmarkError, Result, Spread
from normkit.cli import bench
from normkit.cli.app import main

RESULT = Result(
    "bn",
    "256,512",
    1,
    {"title": "", "layout": "NC", "dtype": "float32", "mode": "training", "input_bytes": 524288},
    rounds=3,
    seconds={"ours": Spread(1e-3, 2e-3, 3e-3), "eager": Spread(4e-3, 5e-3, 6e-3), "limit": Spread(1e-3, 1e-3, 1e-3)},
    ratios={"eager": Spread(2.4, 2.5, 2.6)},
    multiples={"ours": Spread(2.0, 2.0, 2.0), "eager": Spread(5.0, 5.0, 5.0)},
)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    return exit.value.code, *capsys.readouterr()


@pytest.fixture
def measured(monkeypatch):
    """What the harness is to find: results, and at their end an exception."""

    def find(*results):
        def made_up(plan):
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                yield result

        monkeypatch.setattr(bench, "run", made_up)

    return find


def test_a_real_run(capsys, tmp_path):
    out_file = tmp_path / "results.json"
    arguments = ["--quick", "--threads", "1", "--only", "small/forward 32,64", "--out", str(out_file)]
    code, out, err = run(capsys, *arguments, "--format", "json")
    document = json.loads(out)
    assert code == 0, err
    assert document == json.loads(out_file.read_text())
    assert document["complete"]
    (case,) = document["cases"]
    assert (case["group"], case["name"], case["threads"], case["rounds"]) == ("small", "forward 32,64", 1, 9)
    assert case["seconds"].keys() == {"ours", "eager", "limit"}
    assert case["ratios"]["eager"].keys() == {"low", "median", "high"}
    (row,) = document["summary"]
    assert row["value"] == pytest.approx(case["ratios"]["eager"]["median"])
    assert "1 of 1: small/forward 32,64" in err


def test_tables(capsys, measured):
    measured(RESULT)
    code, out, _ = run(capsys, "--only", "bn", "--threads", "1")
    assert code == 0
    assert "MALLOC_MMAP_MAX_=0" in out
    assert "2.5 (2.4 to 2.6)" in out
    assert "BN + ReLU training, all cases, over eager" in out


def test_the_plan_follows_the_options(capsys, monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "run", lambda plan: plans.append(plan) or iter(()))
    run(capsys, "--quick", "--threads", "2,1,2", "--only", "small", "--only", "memory", "--allocator", "default")
    run(capsys, "--only", "small")
    quick, full = plans
    assert quick.threads == [2, 1]
    assert {case.group for case in quick.cases} == {"small", "memory"}
    assert (quick.effort.compiles, quick.allocator) == (False, "default")
    assert (full.effort.compiles, full.allocator) == (True, "keep")
    assert full.threads[0] == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BenchmarkError("It ended in 'x'.")])
def test_what_was_measured_before_the_end_is_kept(capsys, measured, stop):
    measured(RESULT, stop)
    code, out, err = run(capsys, "--only", "bn", "--threads", "1", "--format", "json")
    document = json.loads(out)
    assert code == 2
    assert not document["complete"]
    assert len(document["cases"]) == 1
    assert "Stopped after 1 of 12 cases" in err or "It ended in 'x'." in err


def test_a_contestant_that_cannot_run_is_something_found(capsys, measured):
    measured(Result("bn", "x", 1, errors={"compile": "no compiler"}))
    code, _, err = run(capsys, "--only", "bn", "--threads", "1", "--format", "json")
    assert code == 1
    assert "bn/x: compile could not run: no compiler" in err


def test_busy_neighbours_are_named(capsys, measured):
    measured(Result("bn", "x", 1, neighbours=1000.0))
    code, out, err = run(capsys, "--only", "bn", "--threads", "1", "--format", "json")
    assert code == 0
    assert json.loads(out)["cases"][0]["neighbours"] == 1000.0
    assert "Do not trust 1 of 1 cases" in err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--only", "nothing"], ["needs a group (bn, bn-eval", "got 'nothing'", "Try --only"]),
        (["--threads", "two"], ["needs whole numbers from 1 on", "got 'two'", "--threads 1,2"]),
        (["--threads", "0,1"], ["got '0,1'"]),
        (["--threads", ""], ["got ''"]),
        (["--format", "xml"], ["--format", "xml", "json"]),
        (["--allocator", "mine"], ["--allocator", "mine", "keep"]),
        (["--out", "/no/such/folder/file"], ["needs a file that can be written", "/no/such/folder/file"]),
        (["--quik"], ["--quik"]),
    ],
)
def test_wrong_arguments_cannot_run(capsys, monkeypatch, arguments, messages):
    monkeypatch.setattr(bench, "run", lambda plan: pytest.fail("measured all the same"))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
