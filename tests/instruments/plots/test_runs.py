"""Files of records become a page beside them."""

import json

import pytest

from normkit.instruments.plots import recorded_files, report_of
from normkit.json_lines import LineWriter, RecordError
from support.html_reader import Reader


def write(path, *values):
    with LineWriter(path) as writer:
        for step, value in enumerate(values):
            writer.write({"step": step, "probe": "GradientNorms", "layer": "fc", "gradient": value})
    return path


def drawn(page):
    return json.loads(Reader(page.read_text(encoding="utf-8")).of("script", id="figures")[0]["text"])


def test_a_file_has_its_page_beside_it(tmp_path):
    page = report_of(write(tmp_path / "bn.jsonl", 1.0, float("nan"), 2.0))
    assert page == tmp_path / "report.html"
    (figure,) = drawn(page).values()
    assert [(curve["label"], curve["y"]) for curve in figure["curves"]] == [("fc", [1.0, None, 2.0])]


def test_files_of_a_folder_are_compared(tmp_path):
    write(tmp_path / "plain.jsonl", 1.0, 2.0)
    write(tmp_path / "bn.jsonl", 3.0)
    (tmp_path / "notes.txt").write_text("other")
    assert [path.name for path in recorded_files(tmp_path)] == ["bn.jsonl", "plain.jsonl"]
    (figure,) = drawn(report_of(tmp_path)).values()
    assert [(c["label"], c["y"]) for c in figure["curves"]] == [("bn: fc", [3.0]), ("plain: fc", [1.0, 2.0])]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(RecordError, match="line 1 has no step, probe and layer"):
        report_of(tmp_path)
    with pytest.raises(RecordError, match="there is no file"):
        report_of(tmp_path / "missing.jsonl")
    assert not (tmp_path / "report.html").exists()
