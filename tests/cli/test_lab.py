"""`normkit lab`: runs end in a report, and a command that cannot run says why and exits with 2."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from normkit.cli.app import main
from normkit.json_lines import LineWriter
from normkit.lab.experiments import NAMES
from normkit.lab.record import read_run, without_times
from support.written_runs import write_run

LAB = [sys.executable, "-c", "if __name__ == '__main__': from normkit.cli.app import main; main()", "lab"]
QUICK = ["run", "sigmoid-mlp", "--scale", "quick", "--jobs", "1"]
LONG = ["run", "sigmoid-mlp", "--jobs", "2"]  # far longer than a test waits
CHEAP = ["sigmoid-mlp", "ens*"]  # as a part of all; no times are in their tables
PATIENCE = 120.0  # seconds for what takes a few on an idle machine


def lab(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["lab", *map(str, arguments)])
    return exit.value.code, *capsys.readouterr()


def measured(directory):
    return {
        (trial.arm, trial.seed): [*map(without_times, trial.measured), trial.end["status"]]
        for trial in read_run(directory).trials
    }


def records(directory):
    return sorted((directory / "records").glob("*.jsonl"))


def lines(directory):
    """All that is in the records, but for times and the commit, which may be another by the time of a resumption."""
    return {
        path.name: [without_times(json.loads(line)) | {"commit": None} for line in path.read_text().splitlines()]
        for path in records(directory)
    }


def written(directory):
    return sum(path.stat().st_size for path in records(directory))


@contextlib.contextmanager
def started(*arguments, **options):
    """The command in a process group of its own, of which nothing is left."""
    process = subprocess.Popen([*LAB, *map(str, arguments)], start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(is_so, process):
    """Wait for something that a running process does."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < deadline, f"nothing happened within {PATIENCE:.0f} s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lab") / "run"
    run_to_its_end(*QUICK, "--out", directory)
    return directory


def run_to_its_end(*arguments):
    with pytest.raises(SystemExit) as exit:
        main(["lab", *map(str, arguments)])
    assert exit.value.code == 0


def run_apart(*arguments):
    """A run in a process of its own: in this one, what earlier tests left behind may change a last digit."""
    ended = subprocess.run([*LAB, *map(str, arguments)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_run_ends_with_findings_and_a_report(capsys, tmp_path):
    directory = tmp_path / "run"
    code, out, err = lab(capsys, *QUICK, "--out", directory)
    assert code == 0
    assert "The report:" in out
    assert "BN is ahead at" in out
    assert "sigmoid-mlp.bn.0: ended" in err
    assert (directory / "report.html").stat().st_size > 100_000
    assert set(measured(directory)) == {("plain", 0), ("bn", 0)}


def test_a_report_is_written_again(unbroken, capsys):
    (unbroken / "report.html").unlink()
    code, out, _ = lab(capsys, "report", unbroken, "--format", "json")
    assert code == 0
    first, last = json.loads(out)
    assert first["experiment"] == "sigmoid-mlp"
    assert first["outcome"] in ("supported", "contradicted", "unclear")
    assert last["report"] == str(unbroken / "report.html")
    assert (unbroken / "report.html").exists()


def write_probed(path):
    with LineWriter(path) as writer:
        writer.write({"step": 0, "probe": "GradientNorms", "layer": "fc", "gradient": 0.5})


@pytest.mark.parametrize("given", ["mine.jsonl", "."])
def test_a_recorded_training_of_one_s_own_has_a_report(capsys, tmp_path, given):
    write_probed(tmp_path / "mine.jsonl")
    code, out, _ = lab(capsys, "report", tmp_path / given)
    assert (code, out) == (0, f"The report: {tmp_path / 'report.html'}\n")
    assert "GradientNorms: gradient" in (tmp_path / "report.html").read_text(encoding="utf-8")
    code, out, _ = lab(capsys, "report", tmp_path / given, "--format", "json")
    assert (code, json.loads(out)) == (0, [{"report": str(tmp_path / "report.html")}])


def test_a_run_of_the_lab_comes_before_records_beside_it(capsys, unbroken):
    write_probed(unbroken / "mine.jsonl")
    try:
        code, out, _ = lab(capsys, "report", unbroken)
    finally:
        (unbroken / "mine.jsonl").unlink()
    assert code == 0
    assert "BN is ahead at" in out


def test_files_that_are_no_records_are_refused(capsys, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    for given, said in (("other.jsonl", "is not a file of records"), ("missing.jsonl", "there is no file")):
        code, _, err = lab(capsys, "report", tmp_path / given)
        assert code == 2
        assert said in err


@pytest.mark.deep
def test_killed_ten_times_a_run_with_workers_ends_with_the_unbroken_records(tmp_path):
    arguments = ["run", "sigmoid-mlp", "--scale", "quick", "--seeds", "3"]
    run_apart(*arguments, "--out", tmp_path / "unbroken", "--jobs", 1)
    run_and_kill(arguments, tmp_path / "killed", kills=10)
    assert lines(tmp_path / "killed") == lines(tmp_path / "unbroken")


@pytest.mark.deep
def test_killed_in_the_middle_all_of_it_ends_with_the_unbroken_story(tmp_path):
    chosen = [f"--only={name}" for name in CHEAP]
    arguments = ["run", "all", *chosen, "--scale", "quick"]
    run_apart(*arguments, "--out", tmp_path / "unbroken", "--jobs", 1)
    run_and_kill(arguments, tmp_path / "killed", kills=3)
    assert lines(tmp_path / "killed") == lines(tmp_path / "unbroken")
    assert told(tmp_path / "killed") == told(tmp_path / "unbroken")


def told(directory):
    """What a story says of its experiments, but for times."""
    sections = json.loads((directory / "numbers.json").read_text())["sections"]
    assert "The story of Batch Normalization" in (directory / "report.html").read_text(encoding="utf-8")
    return {
        each["title"]: [each["findings"][key] for key in ("outcome", "reasons", "tables")] + [each["certainty"]]
        for each in sections
    }


def run_and_kill(arguments, directory, kills):
    """Kill a run several times soon after it has written a line, then let it end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for kill in range(kills):
        resume = ["--resume"] if kill else []
        with started(*arguments, "--out", directory, *resume, **quiet) as process:
            before = written(directory)
            wait_until(lambda before=before: written(directory) != before, process)
            time.sleep(random.uniform(0.0, 0.1))  # some kills fall between two lines, some while one is written
            assert process.poll() is None, f"it ended before kill {kill + 1} of {kills}"
    run_apart(*arguments, "--out", directory, "--resume")


@pytest.mark.deep
def test_workers_do_not_outlive_a_killed_run(tmp_path):
    directory = tmp_path / "orphans"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(*LONG, "--out", directory, **quiet) as process:
        wait_until(lambda: len(records(directory)) == 2, process)
        process.kill()  # it alone
        process.wait()
        time.sleep(1.0)
        before = written(directory)
        time.sleep(1.5)
        assert written(directory) == before > 0


def heed_ctrl_c():
    """A shell makes what it starts in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.deep
def test_ctrl_c_in_a_terminal_says_how_to_resume(tmp_path):
    directory = tmp_path / "stopped"
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_ctrl_c}
    with started(*LONG, "--out", directory, **options) as process:
        wait_until(lambda: len(records(directory)) == 2, process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"normkit lab run sigmoid-mlp --out {directory} --resume" in said


def test_ctrl_c_says_how_to_resume(tmp_path, capsys, monkeypatch, request):
    directory = tmp_path / "stopped"
    write = LineWriter.write

    def interrupted(self, line):
        if "step" in line:
            signal.raise_signal(signal.SIGINT)
        return write(self, line)

    monkeypatch.setattr(LineWriter, "write", interrupted)
    # In a process that a shell started in the background, Python leaves Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    code, _, err = lab(capsys, *QUICK, "--out", directory)
    assert code == 130
    assert f"normkit lab run sigmoid-mlp --out {directory} --resume" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "sigmoid-mpl"], 'Did you mean "sigmoid-mlp"?'),
        (["run", "sigmoid-mlp", "--scale", "desc"], 'Did you mean "desk"?'),
        (["run", "sigmoid-mlp", "--data", "fashion-mni"], "fashion-mini"),
        (["run", "sigmoid-mlp", "--seeds", "0"], "--seeds"),
        (["run", "all", "--only", "sigmoid-mpl"], 'Did you mean "sigmoid-mlp"?'),
        (["run", "all", "--only", "affine", "--only", "b*"], "got 'b*', which none matches"),
        (["run", "paper", "--only", "affine"], "--only needs an experiment of 'paper'"),
        (["run", "sigmoid-mlp", "--out", "none", "--resume"], "holds no run that could be resumed"),
        (["report", "/nonexistent"], "holds no run"),
        (["compare", "/nonexistent", "/neither"], "/nonexistent holds no run"),
    ],
)
def test_what_cannot_run_is_said(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = lab(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(unbroken, capsys):
    before = measured(unbroken)
    code, _, err = lab(capsys, *QUICK, "--out", unbroken)
    assert code == 2
    assert "holds a run already. Resume it (--resume), or choose another --out." in err
    assert measured(unbroken) == before


def test_a_run_is_not_resumed_as_another(unbroken, capsys):
    code, _, err = lab(capsys, *QUICK, "--data", "mnist", "--out", unbroken, "--resume")
    assert code == 2
    assert "has data None, and can only be resumed as it is" in err


def test_the_experiments_are_listed(capsys):
    _, out, _ = lab(capsys, "list", "--format", "json")
    assert [row["name"] for row in json.loads(out)] == list(NAMES)


def test_the_sets_are_listed(capsys):
    _, out, _ = lab(capsys, "list")
    assert "paper\n    A set: inception and sigmoid-mlp, on one page." in out
    assert out.endswith("all\n    A set: all of the above, on one page.\n")


# ---- all experiments, and two runs


@pytest.mark.deep
def test_a_part_of_all_is_run_and_the_rest_is_said_to_be_left(tmp_path, capsys):
    arguments = ["run", "all", "--scale", "quick", "--jobs", "1", "--out", tmp_path]
    code, _, err = lab(capsys, *arguments, "--only", "sigmoid-*")
    assert code == 0
    assert set(measured(tmp_path)) == {("plain", 0), ("bn", 0)}
    assert "sigmoid-mlp.bn.0: ended" in err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The story of Batch Normalization" in page
    assert f"{len(NAMES) - 1} not run" in page
    assert f"normkit lab run all --out {tmp_path.name} --resume" in page


def test_a_story_is_told_again_with_its_verdicts_on_the_terminal(tmp_path, capsys):
    write_run(tmp_path, seeds=1, planned=2)
    code, out, _ = lab(capsys, "report", tmp_path)
    assert code == 0
    assert "The story of Batch Normalization" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "incomplete: 2 of 4 trials have ended" in out


def test_ctrl_c_in_a_part_of_all_says_how_to_resume_that_part(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("normkit.lab.conclusion.run", interrupted)
    code, _, err = lab(capsys, "run", "all", "--only", "sig*", "--out", tmp_path)
    assert code == 130
    assert f"normkit lab run all --only 'sig*' --out {tmp_path} --resume" in err


def test_two_runs_are_compared(tmp_path, capsys):
    one, again = write_run(tmp_path / "one"), write_run(tmp_path / "again", shift=0.01)
    other = write_run(tmp_path / "other", "sigmoid-mlp", ["sigmoid-mlp"], low=("bn",))
    code, out, _ = lab(capsys, "compare", one, again)
    assert code == 0
    assert "sigmoid-mlp: the same verdict" in out
    assert "Verdicts that differ, of 2: none." in out
    code, out, _ = lab(capsys, "compare", one, other)
    assert code == 1
    assert "sigmoid-mlp: the verdicts differ" in out
    assert "Verdicts that differ, of 1: sigmoid-mlp." in out
    assert f"Only in {one}: norm-free." in out
    code, out, _ = lab(capsys, "compare", one, other, "--format", "json")
    assert (code, json.loads(out)["agree"]) == (1, False)
