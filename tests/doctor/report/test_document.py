import json
import math

import pytest

from support import diagnoses


def strict(text):
    """Read JSON as the standard has it: without NaN and infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_it_has_all_findings_and_all_evidence():
    made = diagnoses.spoiled()
    document = strict(made.to_json())
    assert (document["model"], document["ok"]) == ("Sequential", False)
    assert document["evidence"] == made.evidence
    assert [found["layer"] for found in document["findings"]] == [found.layer for found in made.findings]
    assert document["findings"][0] == {
        "code": "NK102",
        "name": "stale-statistics",
        "severity": "error",
        "layer": made.findings[0].layer,
        "message": diagnoses.STALE,
        "evidence": {"share": 0.9, "distance": 3.1},
        "remedy": diagnoses.RECALIBRATE,
    }


def test_what_is_not_finite_is_a_word():
    made = diagnoses.small()
    assert math.isnan(made.evidence["gap"]["evaluation"])
    assert strict(made.to_json())["evidence"]["gap"]["evaluation"] == "nan"


def test_a_healthy_model_is_ok():
    document = strict(diagnoses.healthy().to_json())
    assert (document["ok"], document["findings"]) == (True, [])
