"""The summary on a terminal."""

import io

from rich.console import Console

from normkit.lab.report import terminal_table
from support import report_samples


def printed(findings, width=160):
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_table(findings))
    return console.file.getvalue()


def test_it_says_verdict_reasons_tables_and_notes():
    findings = report_samples.paper_findings()
    text = printed(findings)
    assert text.startswith(f"supported: {findings.claim}\n")
    for said in (*findings.reasons, *findings.notes, findings.source, findings.tables[0].title, "31,000,000", "0.7222"):
        assert said in text


def test_names_are_no_markup():
    assert (
        printed(report_samples.hostile_findings(), 300).count(report_samples.HOSTILE) == 8
    )  # claim, source, reason, note, and a table's title, column, cell and note


def test_it_fits_a_narrow_terminal():
    assert max(map(len, printed(report_samples.paper_findings(), 60).splitlines())) <= 60
