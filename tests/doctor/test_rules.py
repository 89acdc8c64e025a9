"""Every rule finds its fault in the faulty twin, in the right layers, and is silent on the healthy one."""

import re

import pytest

import normkit as nk
from normkit.doctor import RULES
from normkit.doctor.rule import chosen
from support import examined_twins  # noqa: F401  # registers them
from support.patients import TWINS
from support.refusal import refused

RANKS = {"NK401", "NK402", "NK403"}  # tests/doctor/test_ranks.py
SECTIONS = ["Why it hurts:", "Evidence and threshold:", "Not a fault when:", "Remedy:"]

# The table of codes: for ever.
NAMES = {
    "NK101": "untrained-statistics",
    "NK102": "stale-statistics",
    "NK103": "non-finite-statistics",
    "NK104": "inverted-momentum",
    "NK105": "epsilon-dominates",
    "NK106": "noisy-statistics",
    "NK107": "single-value-batch",
    "NK108": "mixed-domains",
    "NK109": "padding-in-statistics",
    "NK201": "batch-dependent-evaluation",
    "NK202": "frozen-but-drifting",
    "NK203": "inconsistent-freeze",
    "NK204": "stray-update",
    "NK205": "double-update",
    "NK206": "accumulated-micro-batches",
    "NK301": "redundant-bias",
    "NK302": "decayed-affine",
    "NK303": "dropout-before-norm",
    "NK304": "degenerate-group",
    "NK305": "shared-norm",
    "NK306": "dead-scale",
    "NK307": "runaway-scale",
    "NK401": "diverged-ranks",
    "NK402": "unsynced-small-batch",
    "NK403": "broadcast-hazard",
    "NK501": "training-mode-export",
    "NK502": "manifest-drift",
    "NK503": "lossy-fold",
    "NK504": "unequal-export",
}


@pytest.mark.parametrize("code", sorted(TWINS))
def test_the_faulty_twin_is_caught_and_the_healthy_one_is_not(code):
    faulty, healthy = TWINS[code]()
    findings = [finding for finding in faulty.examine(code).findings if finding.code == code]
    assert {finding.layer for finding in findings} == faulty.layers
    assert healthy.found(code) == set()
    for finding in findings:
        assert finding.name == NAMES[code]
        assert finding.message
        assert finding.remedy


def test_every_rule_that_examine_checks_has_twins():
    checked = {code for code, rule in RULES.items() if rule.examine is not None}
    assert checked == {*TWINS, *RANKS}


def test_the_codes_are_those_of_the_table_in_their_order():
    assert {code: RULES[code].name for code in NAMES} == NAMES
    assert list(RULES) == sorted(RULES)


@pytest.mark.parametrize("code", sorted(NAMES))
def test_the_page_of_a_rule_says_all_that_a_page_says(code):
    rule = RULES[code]
    places = [rule.page.find(section) for section in SECTIONS]
    assert min(places) > 0, rule.page
    assert places == sorted(places)
    assert rule.summary.endswith(".")
    assert "\n" not in rule.summary
    assert not re.search(r"[ \t]$", rule.page, re.M)


def test_rules_are_chosen_by_codes_beginnings_and_names():
    assert [rule.code for rule in chosen("NK10", "NK101, stale-statistics")][:2] == ["NK103", "NK104"]
    assert [rule.code for rule in chosen(["nk501", "lossy-fold"], None)] == ["NK501", "NK503"]
    assert [rule.code for rule in chosen(None, "NK")] == []
    refused(lambda: chosen("NK999", None), "NK999", "--rules")
    refused(lambda: chosen("stale-statistic", None), "stale-statistics")


def test_a_verb_of_surgery_names_its_findings_as_the_rules_do(tmp_path):
    faulty, _ = TWINS["NK501"]()
    assert faulty.examine().findings[0].severity == RULES["NK501"].severity == "error"
    model = nk.BatchNorm2d(3, eps=1e-3)
    nk.save(model, tmp_path / "file.safetensors")
    with pytest.raises(nk.MismatchError) as caught:
        nk.load(nk.BatchNorm2d(3), tmp_path / "file.safetensors")
    assert (caught.value.code, caught.value.layers) == ("NK502", [""])
