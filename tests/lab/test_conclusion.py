"""Run and report in one call."""

import subprocess
import sys

import pytest

from normkit import lab
from normkit.errors import ArgumentError
from normkit.lab import experiments
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
