"""Two runs side by side, from their records."""

import json

import pytest

from normkit.errors import ArgumentError
from normkit.lab import compare_runs
from normkit.lab.comparison import _differences
from normkit.lab.record import RecordError
from support.written_runs import MADE_UP, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "one": write_run(folder / "one"),
        "again": write_run(folder / "again", shift=0.01),
        "other": write_run(folder / "other", low=("bn",), seeds=1),
        "sigmoid": write_run(folder / "sigmoid", "sigmoid-mlp", ["sigmoid-mlp"]),
        "free": write_run(folder / "free", "norm-free", ["norm-free"]),
    }


def test_runs_with_the_same_verdicts_agree_though_their_numbers_differ(runs):
    found = compare_runs(runs["one"], str(runs["again"]))
    assert found.agrees
    assert [(each.name, each.agrees, each.settings) for each in found.experiments] == [(n, True, {}) for n in MADE_UP]
    assert found.conditions == {}
    one, other = found.experiments[0].sections
    assert one.findings.reasons != other.findings.reasons
    assert found.only == ([], [])


def test_verdicts_that_differ_are_found_with_how_sure_they_are(runs):
    found = compare_runs(runs["one"], runs["other"])
    assert not found.agrees
    sides = [[(s.findings.outcome, s.how_sure) for s in each.sections] for each in found.experiments]
    assert sides == [[("supported", "the same in 2 of 2 seeds alone"), ("contradicted", "one seed")]] * 2
    assert found.conditions == {"seeds": ("0, 1", "0")}


def test_what_only_one_run_has_is_named(runs):
    found = compare_runs(runs["sigmoid"], runs["one"])
    assert [each.name for each in found.experiments] == ["sigmoid-mlp"]
    assert found.only == ([], ["norm-free"])
    assert compare_runs(runs["one"], runs["sigmoid"]).only == (["norm-free"], [])


def test_what_runs_differ_in_is_named(runs, tmp_path):
    other = write_run(tmp_path / "run", names=["sigmoid-mlp"])
    for path in (other / "records").iterdir():
        text = path.read_text()
        for old, new in (
            ('"torch": "2.13.0+cpu"', '"torch": "2.14.0"'),
            ('"commit": "5', '"commit": "6'),
            ('"rate": 0.5', '"rate": 0.25'),
        ):
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
    found = compare_runs(runs["one"], other)
    assert set(found.conditions) == {"torch", "commit"}
    assert found.conditions["torch"] == ("2.13.0+cpu", "2.14.0")
    assert found.experiments[0].settings == {"rate": ("0.5", "0.25")}


def test_a_name_that_one_side_lacks_is_a_difference():
    assert _differences({"cpu": "a", "cores": "2"}, {"cores": "2", "threads": "1"}) == {
        "cpu": ("a", ""),
        "threads": ("", "1"),
    }


def test_programs_get_all_of_it(runs):
    found = json.loads(json.dumps(compare_runs(runs["one"], runs["other"]).summary()))
    assert (found["agree"], found["only"]) == (False, [[], []])
    first = found["experiments"][0]
    assert (first["experiment"], first["agree"]) == ("sigmoid-mlp", False)
    for side in first["found"]:
        assert side["reasons"]
        assert side["tables"][0]["rows"]
        assert side["how_sure"]


def test_what_cannot_be_compared_is_refused(runs, tmp_path):
    with pytest.raises(ArgumentError, match=r"no experiment in common: .* has sigmoid-mlp; .* has norm-free"):
        compare_runs(runs["sigmoid"], runs["free"])
    with pytest.raises(RecordError, match="holds no run"):
        compare_runs(runs["one"], tmp_path)
