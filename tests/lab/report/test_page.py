"""What the page says, read without a browser."""

import json
import math
import subprocess
import sys

import pytest

from normkit.errors import MissingExtraError, NormkitError
from normkit.figures.figure import Figure
from normkit.lab.findings import Findings
from normkit.lab.record import Run
from normkit.lab.report import Section, write_report
from support import report_samples
from support.html_reader import Reader


@pytest.fixture(scope="module")
def page(report):
    return Reader(report.read_text(encoding="utf-8"))


def test_it_has_a_section_each_and_contents_that_lead_there(page):
    ids = [element["id"] for element in page.of("section", class_="experiment")]
    assert [e["href"] for e in page.of("a") if e["href"] in {f"#{i}" for i in ids}] == [f"#{i}" for i in ids]
    assert len(page.of("nav")) == 1
    assert [e["text"] for e in page.of("h2")] == [s.title for s in report_samples.sections()]


def test_one_section_needs_no_contents(tmp_path):
    path = write_report([report_samples.paper_section()], tmp_path / "new" / "report.html")
    single = Reader(path.read_text(encoding="utf-8"))
    assert single.of("nav") == []
    assert single.of("title")[0]["text"].startswith("Fewer steps")


def test_ids_are_unique_and_labels_lead_to_them(page):
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert {e["aria-labelledby"] for e in page.elements if "aria-labelledby" in e} <= set(ids)


def test_it_says_claim_source_verdict_reasons_notes_and_command(page):
    text = page.of("body")[0]["text"]
    for section in report_samples.sections():
        found = section.findings
        for said in (found.claim, found.source, found.outcome, *found.reasons, *found.notes, section.command):
            assert said in text


def test_diverged_and_unfinished_trials_are_shown(page):
    text = page.of("table", class_="odd")[0]["text"]
    assert text.count("diverged") == 3
    assert text.count("the loss is nan at step 9000") == 3
    assert "unfinished" in text
    assert "not finite from steps 9,000" in page.of("figure")[0]["text"]


def test_it_says_what_ran_on_what(page):
    text = page.of("section", class_="provenance")[0]["text"]
    header = report_samples.paper_run().header
    for said in (header["commit"], "2.13.0+cpu", "Example(R) Processor 3000", "0 to 2", "0.045", "13,564,322"):
        assert said in text
    assert "runs/inception/" not in text


def test_tables_hold_the_numbers_of_the_findings(page):
    shown = [e["value"] for e in page.of("data")]
    tables = [table for section in report_samples.sections() for table in section.findings.tables]
    cells = [cell for table in tables for row in table.rows for cell in row if isinstance(cell, int | float)]
    assert shown == [str(cell) for cell in cells]


def test_figures_hold_the_numbers_of_the_findings(page):
    drawn = json.loads(page.of("script", id="figures")[0]["text"])
    figures = [figure for section in report_samples.sections() for figure in section.findings.figures]
    assert list(drawn) == [e["id"] for e in page.of("figure")]
    for data, figure in zip(drawn.values(), figures, strict=True):
        for got, curve in zip(data["curves"], figure.curves, strict=True):
            assert got["x"] == curve.x
            assert got["y"] == [y if math.isfinite(y) else None for y in curve.y]
            assert (got["low"], got["high"]) == (curve.low, curve.high)
            assert got["published"] == curve.is_published


def test_an_axis_is_logarithmic_where_a_figure_says_so(tmp_path):
    figures = [Figure("rates", "rate", "accuracy", [], log_x=True), Figure("steps", "steps", "accuracy", [])]
    section = Section(report_samples.paper_run(), Findings("", "", "unclear", [], figures=figures), "title", "")
    page = Reader(write_report([section], tmp_path / "r.html").read_text(encoding="utf-8"))
    drawn = json.loads(page.of("script", id="figures")[0]["text"])
    assert [data["log_x"] for data in drawn.values()] == [True, False]


def test_numbers_of_a_figure_stand_below_it(page):
    text = page.of("details", class_="figure-numbers")[0]["text"]
    assert "0.0520 (0.0400 to 0.0604)" in text
    assert "NaN" in text


def test_every_plot_is_described(page):
    plots = page.of("div", class_="chart", role="img")
    assert "BN-x5: from 0 at 0 to" in plots[0]["aria-label"]
    assert "never finite: no finite value." in plots[1]["aria-label"]


def test_pictures_are_in_the_page_and_have_names(page):
    shown = [pictures for section in report_samples.sections() for pictures in section.findings.pictures]
    rows = [(f"{of.title}: {name}", f"data:image/png;base64,{row}") for of in shown for name, row in of.rows]
    assert [(e["alt"], e["src"]) for e in page.of("img")] == rows
    assert [e["text"].strip() for e in page.of("caption")].count("Samples") == 1
    assert "Four of each." in page.of("main")[0]["text"]


def test_nothing_breaks_out(page, report):
    scripts = page.of("script")
    assert [s.get("type") for s in scripts] == ["application/json", None, None]
    assert report_samples.HOSTILE in page.of("h2")[1]["text"]
    assert "<script>throw" not in report.read_text(encoding="utf-8").replace(scripts[1]["text"], "")
    assert page.of("b") == []


def test_nothing_is_fetched(page):
    allowed = page.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    links = [e.get("src") or e.get("href") for e in page.elements if "src" in e or "href" in e]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []


def test_an_empty_run_and_empty_findings_make_a_page(tmp_path):
    empty = Findings("claim", "source", "unclear", [], figures=[Figure("none", "x", "y", [])])
    section = Section(Run(tmp_path, []), empty, "title", "command")
    assert "none yet" in Reader(write_report([section], tmp_path / "r.html").read_text()).of("main")[0]["text"]


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}.*pip install 'normkit\[lab\]'") as caught:
        write_report(report_samples.sections(), tmp_path / "r.html")
    assert isinstance(caught.value, NormkitError)
    assert isinstance(caught.value, ImportError)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.deep
def test_importing_leaves_the_extra_alone():
    code = "import sys, normkit.lab.report; print({'plotly', 'jinja2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
