"""The page of a diagnosis, read without a browser."""

import sys

import pytest

from normkit.doctor.report.page import MOST_LAYERS
from normkit.errors import MissingExtraError
from support import diagnoses
from support.html_reader import Reader
from support.report_samples import HOSTILE


def page_of(diagnosis, folder):
    return Reader(diagnosis.to_html(folder / "new" / "page.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def spoiled():
    return diagnoses.spoiled()


@pytest.fixture(scope="module")
def page(spoiled, tmp_path_factory):
    return page_of(spoiled, tmp_path_factory.mktemp("page"))


def test_it_says_what_was_found_first(page, spoiled):
    text = page.of("header")[0]["text"]
    assert "Sequential: 2 errors, 1 warning, 1 note" in text
    assert "53 norm layers, 8 batches" in text
    main = page.of("main")[0]["text"]
    for found in spoiled.findings:
        assert found.layer in main
        assert found.message in main
    assert [e["id"] for e in page.of("section") if e.get("id", "").startswith("NK")] == ["NK102", "NK303", "NK301"]


def test_the_gap_is_drawn_to_scale(page):
    bars = [float(bar["style"].removeprefix("width: ").removesuffix("%")) for bar in page.of("span", class_="bar")]
    assert bars == pytest.approx([100 * 0.31 / 2.302, 100.0, 100 * 0.33 / 2.302], abs=0.01)


def test_the_map_has_every_layer_in_its_color(page, spoiled):
    cells = [e for e in page.elements if e.get("class", "").startswith("cell ")]
    assert len(cells) == 53
    worst = {cell["title"].partition(",")[0]: cell["class"].split() for cell in cells}
    first, second = (found.layer for found in spoiled.findings[:2])
    assert worst[first] == ["cell", "heat4", "error"]
    assert worst[second] == ["cell", "heat2", "error"]
    assert worst["bn1"] == ["cell", "heat0", "warning"]
    assert worst["layer1.1.bn1"] == ["cell", "heat0"]


def test_a_cell_leads_to_the_statistics_of_its_layer(page):
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))
    links = [e["href"].removeprefix("#") for e in page.of("a")]
    assert len(links) == 53
    assert set(links) <= set(ids)


def test_the_worst_layers_are_drawn_first_and_the_others_folded(page, spoiled):
    layers = page.of("section", class_="layer")
    assert len(layers) == 53
    first, second = (found.layer for found in spoiled.findings[:2])
    assert first in layers[0]["text"]
    assert second in layers[1]["text"]
    assert "90% of the gap" in layers[0]["text"]
    assert f"The other {53 - MOST_LAYERS} layers" in page.of("summary")[-1]["text"]
    assert len(page.of("svg")) == 106
    assert all(e["aria-label"].startswith("Stored against measured ") for e in page.of("svg"))


def test_a_rule_explains_itself_and_a_finding_shows_its_numbers(page):
    assert {"About this rule", "Evidence"} <= {e["text"] for e in page.of("summary")}
    assert "3.1" in [e["text"] for e in page.of("dd")]
    assert "nk.recalibrate(model, batches)" in [e["text"] for e in page.of("code")]


def test_three_norms_of_which_one_stores_nothing(tmp_path):
    page = page_of(diagnoses.small(), tmp_path)
    assert len(page.of("section", class_="layer")) == 2
    assert [e["title"] for e in page.of("span", class_="cell heat0")] == ["norm, LayerNorm"]
    text = page.of("main")[0]["text"]
    assert "No layer was found to cause a part of a gap" in text
    assert "1 not drawn" in text


def test_a_healthy_model_has_a_page(tmp_path):
    page = page_of(diagnoses.healthy(), tmp_path)
    assert "nothing was found" in page.of("header")[0]["text"]
    assert "found no fault" in page.of("main")[0]["text"]
    assert page.of("span", class_="bar") == []


def test_nothing_breaks_out_and_nothing_is_fetched(tmp_path):
    page = page_of(diagnoses.hostile(), tmp_path)
    assert [e.get("type") for e in page.of("script")] == ["application/json"]
    assert HOSTILE in page.of("main")[0]["text"]
    allowed = page.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert allowed.startswith("default-src 'none'; script-src 'none'")
    links = [e.get("src") or e.get("href") for e in page.elements if "src" in e or "href" in e]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []


def test_it_looks_like_the_other_pages(page, tmp_path):
    from normkit.figures import write_page

    other = Reader(write_page("t", "", [], [], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert page.of("style")[0]["text"] == other.of("style")[0]["text"]


def test_it_needs_no_plotly(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert diagnoses.healthy().to_html(tmp_path / "p.html").exists()


def test_a_missing_package_leaves_the_old_page(monkeypatch, tmp_path):
    (tmp_path / "p.html").write_text("old")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"needs jinja2.*pip install 'normkit\[lab\]'"):
        diagnoses.healthy().to_html(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == "old"
