"""Every rule of the doctor has a page, whose text is the rule's docstring."""

import re
from pathlib import Path

import pytest

import normkit as nk
from normkit import doctor
from normkit.doctor import RULES
from rule_markdown import rule_as_markdown, rules_as_markdown
from support.pages import ROOT

FOLDER = ROOT / "docs" / "doctor"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_a_rule_has_a_page(rule):
    page = (FOLDER / f"{rule.code}.md").read_text()
    assert page == f"# {rule.code}: {rule.name}\n\n```{{rule}} {rule.code}\n```\n"


def test_a_page_has_a_rule():
    assert {path.stem for path in FOLDER.glob("NK*.md")} == set(RULES)


def test_the_text_is_the_docstring_and_the_table_has_every_rule():
    for rule in RULES.values():
        text = rule_as_markdown(rule)
        assert rule.summary.split()[0] in text
        assert f"--explain {rule.code}" in text
    table = rules_as_markdown(RULES.values()).splitlines()
    assert len(table) == len(RULES) + 2
    assert {line.count(" | ") for line in table} == {4}


def test_the_list_of_the_folder_has_all_pages():
    index = (FOLDER / "index.md").read_text()
    assert "```{rules}" in index
    assert ":glob:" in index


def test_what_a_remedy_calls_is_there():
    sources = [path.read_text() for path in Path(doctor.__file__).parent.rglob("*.py")]
    called = {name for source in sources for name in re.findall(r"\bnk\.([a-z_]+)", source)}
    assert {"recalibrate", "convert"} < called
    assert [name for name in sorted(called) if not hasattr(nk, name)] == []
