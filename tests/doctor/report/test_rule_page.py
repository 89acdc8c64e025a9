import io

import pytest
from rich.console import Console

from normkit.doctor.report.rule_page import TITLES, as_markdown, sections, seen_sentence, terminal_page
from normkit.doctor.rule import RULES, Rule

PAGE = """Evaluation uses statistics that
no batch has updated.

Why it hurts: zeros and ones stand in
    for the data's own.

Evidence and threshold:
    A count of `0`.

    - one
    - two
Not a fault when: it is meant.

Remedy:
    Take them:

        nk.recalibrate(model, batches)
"""
RULE = Rule("NK901", "made-up", "error", frozenset({"examine", "watch"}), "Summary.", PAGE)


def printed(rule, width=80):
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(terminal_page(rule))
    return "\n".join(map(str.rstrip, screen.getvalue().splitlines()))


def test_a_page_has_its_parts():
    assert [(part.title, part.text) for part in sections(RULE)] == [
        ("", "Evaluation uses statistics that\nno batch has updated."),
        ("Why it hurts", "zeros and ones stand in\nfor the data's own."),
        ("Evidence and threshold", "A count of `0`.\n\n- one\n- two"),
        ("Not a fault when", "it is meant."),
        ("Remedy", "Take them:\n\n    nk.recalibrate(model, batches)"),
    ]


def test_as_markdown_it_says_all_of_it():
    assert as_markdown(RULE).split("\n\n") == [
        "Evaluation uses statistics that\nno batch has updated.",
        "**Why it hurts**",
        "zeros and ones stand in\nfor the data's own.",
        "**Evidence and threshold**",
        "A count of `0`.",
        "- one\n- two",
        "**Not a fault when**",
        "it is meant.",
        "**Remedy**",
        "Take them:",
        "    nk.recalibrate(model, batches)",
        "Severity: error. Seen by `nk.examine` and `nk.watch`.",
    ]


def test_on_a_terminal_paragraphs_are_wrapped_and_code_is_not():
    text = printed(RULE)
    assert text.startswith("NK901 made-up\n")
    assert "Evaluation uses statistics that no batch has updated." in text
    assert "      nk.recalibrate(model, batches)" in text
    assert "  - one\n  - two" in text


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_every_rule_s_page_is_whole(rule):
    first, *rest = sections(rule)
    assert first.text
    assert [part.title for part in rest] == list(TITLES)
    assert all(part.text for part in rest)
    assert rule.seen_by
    assert f"Severity: {rule.severity}" in seen_sentence(rule)
