import json

import pytest

from normkit.bench import BenchmarkError, Result, Spread, TrafficRow
from normkit.bench.traffic_table import Counted
from normkit.cli import bench
from normkit.cli.app import main
from normkit.kernels import core

RESULT = Result(
    "batch",
    "BN + ReLU 256,512",
    1,
    {"title": "BN + ReLU", "layout": "NC", "dtype": "float32", "mode": "training", "input_bytes": 524288},
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
        def made_up(plan, done):
            find.done = done
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                yield result

        monkeypatch.setattr(bench, "run", made_up)

    return find


def test_a_real_run(capsys, tmp_path):
    out_file = tmp_path / "results.json"
    arguments = ["--quick", "--threads", "1", "--only", "small/BN forward 32,64", "--out", str(out_file)]
    code, out, err = run(capsys, *arguments, "--format", "json")
    document = json.loads(out)
    assert code == 0, err
    assert document == json.loads(out_file.read_text())
    assert document["complete"]
    (case,) = document["cases"]
    assert (case["family"], case["name"], case["threads"], case["rounds"]) == ("small", "BN forward 32,64", 1, 9)
    assert case["seconds"].keys() == {"ours", "eager", "limit"}
    assert case["ratios"]["eager"].keys() == {"low", "median", "high"}
    (row,) = document["summary"]
    assert row["value"] == pytest.approx(case["ratios"]["eager"]["median"])
    assert row["worst"] == case["ratios"]["eager"]["median"]
    assert (row["wanted"], row["wanted_of"]) == (1.0, "worst")
    assert row["reached"] is (row["worst"] >= 1.0)
    assert "1 of 1: small/BN forward 32,64" in err


def test_tables(capsys, measured):
    measured(RESULT)
    code, out, _ = run(capsys, "--only", "batch", "--threads", "1")
    assert code == 0
    assert "MALLOC_MMAP_MAX_=0" in out
    assert "2.5 (2.4 to 2.6)" in out
    (row,) = (line for line in out.splitlines() if "BN + ReLU training, 2-D fp32, over eager" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:] == ["1", "1", "1.00", "2.50", "2.50", ">= 1.25", "yes", "BN + ReLU 256,512"]


def test_a_figure_that_every_case_must_reach_says_so(capsys, measured):
    facts = {"title": "BN", "layout": "NC", "dtype": "float32", "mode": "forward", "input_bytes": 8192}
    slower, faster = (Result("small", f"BN {x}", 1, facts, ratios={"eager": Spread(x, x, x)}) for x in (0.5, 8.0))
    measured(slower, faster)
    _, out, _ = run(capsys, "--family", "small", "--threads", "1")
    (row,) = (line for line in out.splitlines() if "a call on (32, 64)" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:] == ["1", "2", "1.00", "2.00", "0.50", "each >= 1.00", "no", "BN 0.5"]


def test_the_plan_follows_the_options(capsys, monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "run", lambda plan, done: plans.append(plan) or iter(()))
    run(capsys, "--quick", "--threads", "2,1,2", "--only", "small", "--only", "memory", "--allocator", "default")
    run(capsys, "--only", "small")
    run(capsys, "--family", "masks", "--family", "types", "--options", "--isa", "baseline")
    quick, full, families = plans
    assert quick.threads == [2, 1]
    assert {case.family for case in quick.cases} == {"small", "memory"}
    assert {case.family for case in families.cases} == {"masks", "types", "options"}
    assert (families.isa, full.isa) == ("baseline", None)
    assert (quick.effort.compiles, quick.allocator) == (False, "default")
    assert (full.effort.compiles, full.allocator) == (True, "keep")
    assert full.threads[0] == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BenchmarkError("It ended in 'x'.")])
def test_what_was_measured_before_the_end_is_kept(capsys, measured, stop):
    measured(RESULT, stop)
    code, out, err = run(capsys, "--only", "batch", "--threads", "1", "--format", "json")
    document = json.loads(out)
    assert code == 2
    assert not document["complete"]
    assert len(document["cases"]) == 1
    assert "Stopped after 1 of 88 cases" in err or "It ended in 'x'." in err


def test_a_contestant_that_cannot_run_is_something_found(capsys, measured):
    measured(Result("batch", "x", 1, errors={"compile": "no compiler"}))
    code, _, err = run(capsys, "--only", "batch", "--threads", "1", "--format", "json")
    assert code == 1
    assert "batch/x: compile could not run: no compiler" in err


def test_busy_neighbours_are_named(capsys, measured):
    measured(Result("batch", "x", 1, neighbours=1000.0))
    code, out, err = run(capsys, "--only", "batch", "--threads", "1", "--format", "json")
    assert code == 0
    assert json.loads(out)["cases"][0]["neighbours"] == 1000.0
    assert "Do not trust 1 of 1 cases" in err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--only", "nothing"], ["needs a family (batch, activations", "got 'nothing'", "Try --only"]),
        (["--family", "relative"], ["must be one of batch, ", "got 'relative'", 'Did you mean "relatives"?']),
        (["--family", "small", "--only", "batch"], ["needs a family (small)", "got 'batch'"]),
        (["--isa", "sse9"], ["--isa", "sse9", "avx2"]),
        (["--resume"], ["--resume needs the file", "--out FILE"]),
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
    monkeypatch.setattr(bench, "run", lambda plan, done: pytest.fail("measured all the same"))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err


def test_an_interrupted_run_is_resumed(capsys, measured, tmp_path):
    options = ["--only", "batch/BN + ReLU 256,512*", "--threads", "1", "--format", "json", "--out", str(tmp_path / "o")]
    measured(RESULT, KeyboardInterrupt())
    code, _, err = run(capsys, *options)
    assert code == 2
    assert "Stopped after 1 of 2 cases" in err
    measured(Result("batch", "BN + ReLU 256,512 bf16", 1, RESULT.facts))
    code, out, err = run(capsys, *options, "--resume")
    assert code == 0
    assert measured.done == {("batch/BN + ReLU 256,512", 1)}
    assert "1 of 2 cases were measured before." in err
    assert "2 of 2: batch/BN + ReLU 256,512 bf16" in err
    document = json.loads(out)
    assert document["complete"]
    assert [case["name"] for case in document["cases"]] == ["BN + ReLU 256,512", "BN + ReLU 256,512 bf16"]
    assert document == json.loads((tmp_path / "o").read_text())


def test_without_resume_a_file_is_written_anew(capsys, measured, tmp_path):
    out_file = tmp_path / "o"
    for name in ("BN + ReLU 256,512", "BN + ReLU 256,512 bf16"):
        measured(Result("batch", name, 1, RESULT.facts))
        run(capsys, "--only", "batch", "--threads", "1", "--out", str(out_file))
        assert [case["name"] for case in json.loads(out_file.read_text())["cases"]] == [name]


def test_the_instruction_set_is_put_back(capsys, measured):
    if core.WHY_NOT is not None:
        pytest.skip("normkit was built without its C++ core")
    before = core.instruction_set()
    measured(RESULT)
    _, out, _ = run(capsys, "--only", "batch", "--threads", "1", "--isa", "baseline", "--format", "json")
    document = json.loads(out)
    assert document["settings"]["isa"] == document["environment"]["kernels"]["instruction set"] == "baseline"
    assert core.instruction_set() == before


def test_traffic_is_counted_and_nothing_timed(capsys, monkeypatch, tmp_path):
    few, many = Counted(4, 4000), Counted(5, 4000)
    rows = [TrafficRow("BN + relu", "training", "float32", 400, few, many), TrafficRow("RMS", "x", "y", 400, many, few)]
    monkeypatch.setattr(bench, "count_traffic", lambda: rows)
    monkeypatch.setattr(bench, "run", lambda plan, done: pytest.fail("measured all the same"))
    code, out, _ = run(capsys, "--traffic")
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert code == 0
    assert lines == [
        ["BN + relu", "training", "float32", "5", "4", "10.0", "10.0", "yes"],
        ["RMS", "x", "y", "4", "5", "10.0", "10.0", "no"],
    ]
    code, out, _ = run(capsys, "--traffic", "--format", "json", "--out", str(tmp_path / "o"))
    assert [row["no more than torch"] for row in json.loads(out)] == [True, False]
    assert json.loads(out) == json.loads((tmp_path / "o").read_text())
