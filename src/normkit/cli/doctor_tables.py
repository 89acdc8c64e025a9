"""The doctor's rules, for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from normkit.figures.figure import Table
from normkit.figures.terminal import rich_table

if TYPE_CHECKING:
    from normkit.doctor.rule import Rule

_WIDTH = 160  # columns, where the output is not a terminal


def print_rules(rules: Sequence[Rule]) -> None:
    """A table of codes, names and what they catch."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    rows = [[rule.code, rule.name, rule.severity, ", ".join(sorted(rule.seen_by)), rule.summary] for rule in rules]
    console.print(rich_table(Table("Rules", ["code", "name", "severity", "seen by", "what it catches"], rows)))


def rules_document(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Rules with their pages, in JSON's types."""
    return [
        {
            "code": rule.code,
            "name": rule.name,
            "severity": rule.severity,
            "seen_by": sorted(rule.seen_by),
            "summary": rule.summary,
            "page": rule.page,
        }
        for rule in rules
    ]
