"""Run and report in one call."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from normkit import lab
from normkit.errors import ArgumentError
from normkit.lab import experiments
from normkit.lab.progress import Progress
from normkit.lab.report import story
from normkit.lab.report.chapters import Chapter, Part
from support import toy
from support.written_runs import write_run


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(toy, "EXPERIMENT", toy.Toy(20))
    monkeypatch.setitem(experiments.NAMES, "toy", toy.__name__)


def test_an_experiment_is_run_and_reported_in_one_call(tmp_path):
    found = lab.run_experiment("toy", tmp_path, scale="quick", seeds=2, jobs=1)
    (section,) = found.sections
    assert (section.title, section.findings.outcome, len(section.run.trials)) == ("toy", "unclear", 6)
    assert section.command == f"normkit lab run toy --scale quick --data fashion-mini --seeds 2 --out {tmp_path.name}"
    assert found.report == tmp_path / "report.html"
    assert found.report.exists()
    assert (tmp_path / "numbers.json").exists()
    assert [row["claim"] for row in found.summary()] == ["A line can be drawn."]


def test_a_report_is_made_again_from_the_records(tmp_path):
    first = lab.run_experiment("toy", tmp_path, scale="quick", jobs=1)
    text = first.report.read_text()
    first.report.unlink()
    assert lab.write_report_of(str(tmp_path)).report.read_text() == text


def test_a_resumed_run_keeps_its_own_scale_and_seeds(tmp_path):
    lab.run_experiment("toy", tmp_path, scale="quick", seeds=2, jobs=1)
    (section,) = lab.run_experiment("toy", tmp_path, resume=True, jobs=1).sections
    assert len(section.run.trials) == 6
    with pytest.raises(ArgumentError, match="has seeds 2"):
        lab.run_experiment("toy", tmp_path, seeds=3, resume=True, jobs=1)


def test_nothing_is_written_for_what_cannot_run(tmp_path):
    for wrong in ({"scale": "desc"}, {"data": "mnits"}):
        with pytest.raises(ArgumentError, match="Did you mean"):
            lab.run_experiment("toy", tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


class Reader(toy.Toy):
    """One that takes a text."""

    name, data, takes = "reader", "moby-mini", "text"

    def findings(self, run):
        return toy.Findings("A text can be read.", "nowhere", "unclear", [])


@pytest.fixture
def set_of_both(monkeypatch):
    """A set of the toy, which takes images, and of one that takes a text."""
    monkeypatch.setitem(sys.modules, "support.reader", SimpleNamespace(EXPERIMENT=Reader(20)))
    monkeypatch.setitem(experiments.NAMES, "reader", "support.reader")
    monkeypatch.setitem(experiments.SETS, "both", ("toy", "reader"))


def test_of_a_set_those_get_the_data_that_take_it(tmp_path, set_of_both, capsys):
    text = tmp_path / "own.txt"
    text.write_text("to be, or not to be: that is the question.\n" * 300)
    for given, own in {"fashion-mini": "reader (on moby-mini)", str(text): "toy (on fashion-mini)"}.items():
        directory = tmp_path / f"run-{own[:3]}"
        found = lab.run_experiment("both", directory, scale="quick", data=given, jobs=1, progress=Progress())
        sets = {section.title: section.run.header["data"] for section in found.sections}
        assert sorted(sets.values()) == sorted([given, own.split()[-1][:-1]])
        assert f"Not on {given}, which is of another kind: {own}.\n" in capsys.readouterr().err
        assert lab.run_experiment("both", directory, resume=True, jobs=1).report.exists()


def test_data_that_no_experiment_of_a_set_takes_is_refused(tmp_path, set_of_both):
    with pytest.raises(ArgumentError, match="needs what inception or sigmoid-mlp takes; got 'moby-mini', which is a"):
        lab.run_experiment("paper", tmp_path, scale="quick", data="moby-mini")
    with pytest.raises(ArgumentError, match="needs what reader takes; got 'mnist', which is not a text"):
        lab.run_experiment("both", tmp_path, scale="quick", data="mnist", only=["reader"])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def all_of_two(monkeypatch):
    """A story of the toy and of an experiment that is not run."""
    monkeypatch.setitem(experiments.SETS, "all", ("toy", "sigmoid-mlp"))
    parts = Part("toy", "Can it?", ""), Part("sigmoid-mlp", "Does it?", "")
    monkeypatch.setattr(story, "CHAPTERS", (Chapter("One", "", parts), Chapter("Two", "", ())))


def test_of_all_a_part_is_run_and_the_story_says_what_is_left(tmp_path, all_of_two):
    found = lab.run_experiment("all", tmp_path, scale="quick", only=["t*"], jobs=1)
    assert [section.title for section in found.sections] == ["toy"]
    page = found.report.read_text()
    assert "The story of Batch Normalization" in page
    assert "2 experiments: 1 unclear, 1 not run." in page
    assert "one seed" in page
    assert f"normkit lab run all --out {tmp_path.name} --resume" in page
    assert lab.run_experiment("all", tmp_path, only=["toy"], resume=True, jobs=1).report.read_text() == page
    with pytest.raises(ArgumentError, match="has name 'all', and can only be resumed as it is"):
        lab.run_experiment("toy", tmp_path, resume=True, jobs=1)


def test_a_story_that_was_stopped_says_how_far_it_came(tmp_path, all_of_two):
    found = lab.write_report_of(write_run(tmp_path, names=["sigmoid-mlp"], seeds=1, planned=2))
    assert found.summary()[0]["how_sure"] == "incomplete: 2 of 4 trials have ended"
    assert "incomplete: 2 of 4 trials have ended" in found.report.read_text()


def test_records_without_a_plan_are_reported_as_they_are(tmp_path):
    write_run(tmp_path, names=["sigmoid-mlp"])
    (tmp_path / "run.json").unlink()
    (section,) = lab.write_report_of(tmp_path).sections
    assert section.how_sure == "the same in 2 of 2 seeds alone"


@pytest.mark.deep
def test_importing_the_lab_is_lean():
    code = "import sys, normkit.lab; print(*(name for name in sys.modules if name.startswith('normkit.lab.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
