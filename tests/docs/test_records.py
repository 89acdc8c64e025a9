import json

import pytest

from lab_record import write_records
from normkit.lab.report import write_numbers
from record_markdown import record_as_markdown, verdicts_as_markdown
from support import report_samples
from support.pages import ROOT

RECORDS = sorted((ROOT / "docs").rglob("records/*.json"))
RECORD = {
    "outcome": "unclear",
    "run": "once.",
    "reported": "Commit 1234567.",
    "tables": [
        {"title": "Steps", "columns": ["arm", "steps"], "rows": [["BN", 4500], ["plain", None]]},
        {"title": "Ends", "columns": ["a | b"], "rows": [[0.123456789]]},
    ],
    "notes": ["A note."],
}


def test_shows_verdict_tables_notes_and_provenance():
    assert record_as_markdown(RECORD).split("\n\n") == [
        "Verdict: **unclear**.",
        "**Steps**",
        "| arm | steps |\n| --- | --- |\n| BN | 4500 |\n| plain |  |",
        "**Ends**",
        "| a \\| b |\n| --- |\n| 0.1235 |",
        "A note.",
        "*Measured: once. Commit 1234567.*",
    ]


def test_shows_claim_reasons_and_picture():
    picture = {"file": "b.png", "title": "Loss"}
    beside = {"certainty": "one seed", "reasons": ["one.", "two."], "picture": picture}
    record = RECORD | {"claim": "It is so."} | beside
    assert record_as_markdown(record, "Steps", "records/").split("\n\n")[:4] == [
        "> It is so.",
        "Verdict: **unclear** (one seed).",
        "- one.\n- two.",
        "![Loss](records/b.png)",
    ]


def test_lists_claims_and_verdicts():
    text = verdicts_as_markdown({"a-b": RECORD | {"claim": "It is so.", "certainty": "one seed"}})
    assert text.splitlines()[2:] == ["| [`a-b`](#a-b) | **unclear** | one seed | It is so. |"]


def test_shows_one_table_by_its_title():
    assert "Steps" not in record_as_markdown(RECORD, "Ends")
    with pytest.raises(ValueError, match=r"no table 'Middles'; there are \['Steps', 'Ends'\]"):
        record_as_markdown(RECORD, "Middles")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_row_of_a_kept_record_fits_its_columns(path):
    for table in json.loads(path.read_text())["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_kept_record_is_shown():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in RECORDS if f"records/{path.name}" not in pages] == []


def test_the_numbers_of_a_run_become_records(tmp_path):
    for section in report_samples.sections():
        write_numbers([section], tmp_path)
        (path,) = write_records(tmp_path, tmp_path)
        record, findings = json.loads(path.read_text()), section.findings
        assert path.stem == section.run.header["experiment"]
        assert record["outcome"] == findings.outcome
        assert [table["title"] for table in record["tables"]] == [table.title for table in findings.tables]
        assert section.command in record_as_markdown(record)
        assert (record["claim"], record["reasons"]) == (findings.claim, list(findings.reasons))
        assert record["certainty"] == section.how_sure
        if findings.figures:
            assert record["picture"] == {"file": f"{path.stem}.png", "title": findings.figures[0].title}
            assert (tmp_path / record["picture"]["file"]).read_bytes().startswith(b"\x89PNG")
        else:
            assert "picture" not in record
