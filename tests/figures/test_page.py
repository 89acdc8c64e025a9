"""A page of figures and tables that are of no experiment, read without a browser."""

import json
import sys

import pytest

from normkit.errors import MissingExtraError
from normkit.figures import Curve, Figure, write_page
from support import report_samples
from support.html_reader import Reader

FIGURES = [
    report_samples.accuracy_figure(),
    Figure(report_samples.HOSTILE, "steps", "norm", [Curve("a", [0.0, 1.0], [1.0, 1e-3])], log_y=True),
]
TABLES = [report_samples.main_table()]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "new"
    return write_page(report_samples.HOSTILE, "What leads to it.", FIGURES, TABLES, folder / "page.html")


@pytest.fixture(scope="module")
def page(path):
    return Reader(path.read_text(encoding="utf-8"))


def test_it_says_title_lead_figures_and_tables(page):
    assert page.of("h2")[0]["text"] == report_samples.HOSTILE
    assert "What leads to it." in page.of("main")[0]["text"]
    assert [e["text"] for e in page.of("h3")] == [figure.title for figure in FIGURES]
    assert [e["text"] for e in page.of("caption")] == [table.title for table in TABLES]
    assert "31,000,000" in page.of("table", class_="data")[0]["text"]


def test_its_contents_lead_to_its_figures(page):
    ids = [e["id"] for e in page.of("figure")]
    assert [e["href"] for e in page.of("a")] == [f"#{name}" for name in ids]
    every = [e["id"] for e in page.elements if "id" in e]
    assert len(every) == len(set(every))


def test_it_holds_the_numbers_and_the_axes(page):
    drawn = json.loads(page.of("script", id="figures")[0]["text"])
    assert list(drawn) == [e["id"] for e in page.of("figure")]
    first, second = drawn.values()
    assert [curve["x"] for curve in first["curves"]] == [list(curve.x) for curve in FIGURES[0].curves]
    assert (first["log_y"], second["log_y"]) == (False, True)
    assert second["curves"][0]["y"] == [1.0, 1e-3]


def test_it_looks_like_the_report(page, tmp_path):
    from normkit.lab.report import write_report

    report = Reader(write_report([report_samples.paper_section()], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.of("style")[0]["text"] == report.of("style")[0]["text"]
    scripts = [[e["text"] for e in of.of("script")[1:]] for of in (page, report)]
    assert scripts[0] == scripts[1]


def test_nothing_breaks_out_and_nothing_is_fetched(page):
    assert [e.get("type") for e in page.of("script")] == ["application/json", None, None]
    assert page.of("b") == []
    allowed = page.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    links = [e.get("src") or e.get("href") for e in page.elements if "src" in e or "href" in e]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []


def test_a_page_without_figures_needs_no_script(tmp_path):
    page = Reader(write_page("t", "", [], TABLES, tmp_path / "p.html").read_text(encoding="utf-8"))
    assert len(page.of("script")) == 1
    assert page.of("nav") == []
    assert page.of("p", class_="lead") == []


def test_a_missing_package_leaves_the_old_page(monkeypatch, tmp_path):
    (tmp_path / "p.html").write_text("old")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"needs jinja2.*pip install 'normkit\[lab\]'"):
        write_page("t", "", FIGURES, [], tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == "old"
