"""SARIF as its schema (OASIS, 2.1.0) and GitHub's upload require it, with the requirements written out."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from normkit.doctor.report.sarif import Place, place_of, sarif_document
from normkit.doctor.rule import RULES
from support import diagnoses

MADE = ("spoiled", "small", "healthy", "hostile", "everywhere")


def watched(file, line=7):
    return diagnoses.finding("NK204", "stray-update", "error", "bn", file=file, line=line)


def run_of(text):
    document = json.loads(text)
    assert (document["version"], len(document["runs"])) == ("2.1.0", 1)
    assert document["$schema"].endswith("sarif-2.1.0.json")
    return document["runs"][0]


def results(*findings, place=None):
    return sarif_document(list(findings), list(RULES.values()), place)["runs"][0]["results"]


@pytest.mark.parametrize("made", MADE)
def test_it_is_valid_sarif(made):
    diagnosis = getattr(diagnoses, made)()
    run = run_of(diagnosis.to_sarif("train.py"))
    driver = run["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert ids == list(RULES)
    assert len(run["results"]) == len(diagnosis.findings)
    for result in run["results"]:
        assert result["level"] in {"none", "note", "warning", "error"}
        assert result["message"]["text"]
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert all(isinstance(print_, str) for print_ in result["partialFingerprints"].values())
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["region"]["startLine"] >= 1
        assert re.fullmatch(r"[\w./%~-]+", physical["artifactLocation"]["uri"])


def test_every_rule_has_its_help():
    for rule in run_of(diagnoses.healthy().to_sarif())["tool"]["driver"]["rules"]:
        known = RULES[rule["id"]]
        assert rule["name"] == known.name
        assert rule["shortDescription"]["text"] == known.summary
        assert rule["fullDescription"]["text"]
        assert {"text", "markdown"} <= rule["help"].keys()
        assert rule["helpUri"].startswith("https://")
        assert rule["defaultConfiguration"]["level"] in {"note", "warning", "error"}


def test_levels_are_those_of_severities():
    found = run_of(diagnoses.spoiled().to_sarif())["results"]
    assert [result["level"] for result in found] == ["error", "error", "warning", "note"]


def test_a_call_site_is_a_line_of_a_file_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("src/my train.py", tmp_path / "src" / "my train.py"):
        (found,) = results(watched(str(file)))
        where = found["locations"][0]["physicalLocation"]
        assert where["artifactLocation"] == {"uri": "src/my%20train.py", "uriBaseId": "%SRCROOT%"}
        assert where["region"] == {"startLine": 7}


def test_a_file_elsewhere_keeps_its_whole_address(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (found,) = results(watched(str(tmp_path / "other.py")))
    artifact = found["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": (tmp_path / "other.py").as_uri()}


def test_the_layer_is_a_logical_location():
    (found,) = results(diagnoses.stale("layer3.0.bn2", 0.9))
    assert found["locations"] == [
        {"logicalLocations": [{"name": "bn2", "fullyQualifiedName": "layer3.0.bn2", "kind": "member"}]}
    ]
    assert found["message"]["text"].startswith("layer3.0.bn2: ")
    assert results(diagnoses.finding("NK504", "unequal-export", "error", None))[0]["locations"] == []


def test_a_model_stands_where_its_class_is_defined(monkeypatch):
    class Net(nn.Module):
        pass

    monkeypatch.chdir(Path(__file__).parent)
    place = place_of(Net())
    assert Path(place.file) == Path(__file__)
    assert Path(__file__).read_text().splitlines()[place.line - 1].strip() == "class Net(nn.Module):"
    assert place_of(nn.Sequential()) is None  # torch's own file says nothing of the user's


def test_findings_without_a_line_stand_in_the_file_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_of(diagnoses.spoiled().to_sarif("net.py"))["results"]
    assert {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in found} == {"net.py"}


def test_the_same_fault_has_the_same_fingerprint_in_every_run():
    one, again, other = results(diagnoses.stale("a", 0.9), diagnoses.stale("a", 0.2), diagnoses.stale("b", 0.9))
    prints = [result["partialFingerprints"] for result in (one, again, other)]
    assert prints[0] == prints[1] != prints[2]


def test_evidence_is_kept_as_properties_in_json_s_types():
    (found,) = results(diagnoses.finding("NK103", "non-finite-statistics", "error", "bn", worst=float("inf")))
    assert found["properties"] == {"worst": "inf"}


def test_a_line_before_the_first_is_the_first():
    (found,) = results(diagnoses.stale("bn", 1.0), place=Place("net.py", 0))
    assert found["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
