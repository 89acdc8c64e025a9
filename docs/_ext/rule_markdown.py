"""The doctor's rules as Markdown: the text of a rule's page is its docstring, and stands nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from normkit.doctor.report.rule_page import as_markdown
from normkit.doctor.rule import Rule


def rule_as_markdown(rule: Rule) -> str:
    """The page of a rule, and how to have it on a terminal."""
    return f"{as_markdown(rule)}\n\nOn a terminal: `normkit doctor --explain {rule.code}`."


def rules_as_markdown(rules: Iterable[Rule]) -> str:
    """A table of rules, each with a link to its page."""
    rows = [
        [f"[{rule.code}]({rule.code}.md)", rule.name, rule.severity, _seers(rule), rule.summary.replace("|", "\\|")]
        for rule in rules
    ]
    head = [["code", "name", "severity", "seen by", "what it catches"], ["---"] * 5]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def _seers(rule: Rule) -> str:
    return ", ".join(sorted(rule.seen_by))
