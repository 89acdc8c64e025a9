"""The files beside the page hold the same numbers."""

import csv
import json
import math

import pytest

from normkit.lab.report import write_numbers
from support import report_samples


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_numbers(report_samples.sections(), tmp_path_factory.mktemp("numbers") / "new")


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def or_none(value):
    return value if value is not None and math.isfinite(value) else None


def test_there_is_a_document_and_a_file_for_each_table_and_figure(files):
    assert [path.name for path in files] == [
        "numbers.json",
        "1-fewer-steps-to-the-same-accuracy-table-1-steps-to-the-accuracy-of-inception.csv",
        "1-fewer-steps-to-the-same-accuracy-figure-1-validation-accuracy-over-training.csv",
        "1-fewer-steps-to-the-same-accuracy-figure-2-training-loss.csv",
        "2-script-script-throw-error-out-script-b-a-table-1-script-script-throw-error-out-script-b-a.csv",
        "2-script-script-throw-error-out-script-b-a-figure-1-script-script-throw-error-out-script-b-a.csv",
    ]
    assert all(path.exists() for path in files)


def test_the_document_holds_everything(files):
    sections = json.loads(files[0].read_text(encoding="utf-8"))["sections"]
    for got, section in zip(sections, report_samples.sections(), strict=True):
        found = section.findings
        assert (got["title"], got["command"]) == (section.title, section.command)
        assert (got["findings"]["claim"], got["findings"]["outcome"]) == (found.claim, found.outcome)
        for table, expected in zip(got["findings"]["tables"], found.tables, strict=True):
            assert table["columns"] == list(expected.columns)
            plain = [[or_none(c) if isinstance(c, float) else c for c in row] for row in expected.rows]
            assert table["rows"] == plain
        for figure, expected in zip(got["findings"]["figures"], found.figures, strict=True):
            for curve, of in zip(figure["curves"], expected.curves, strict=True):
                assert (curve["name"], curve["x"], curve["y"]) == (of.name, of.x, [or_none(y) for y in of.y])
                assert (curve["low"], curve["high"]) == (of.low, of.high)
        assert [trial["header"]["seed"] for trial in got["trials"]] == [trial.seed for trial in section.run.trials]
    assert [trial["state"] for trial in sections[0]["trials"]].count("diverged") == 3


def test_a_table_is_written_in_full(files):
    table = report_samples.main_table()
    header, *rows = read_csv(files[1])
    assert header == list(table.columns)
    assert rows == [["" if cell is None else str(cell) for cell in row] for row in table.rows]


def test_a_figure_is_written_point_by_point(files):
    header, *rows = read_csv(files[2])
    assert header == ["curve", "published", "x", "y", "low", "high"]
    curves = report_samples.accuracy_figure().curves
    assert len(rows) == sum(len(curve.x) for curve in curves)
    assert [float(row[3]) for row in rows[: len(curves[0].x)]] == curves[0].y
    assert [row[3] for row in rows if row[0] == report_samples.DIVERGING][-1] == "nan"
    assert {row[1] for row in rows[-len(curves[-1].x) :]} == {"yes"}
    assert rows[-1][4:] == ["", ""]
