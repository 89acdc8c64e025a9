"""The page of a diagnosis in a real browser: offline, readable on a phone, nothing over anything else."""

import pytest

from support import diagnoses
from support.browser import Page

pytestmark = pytest.mark.deep

LONG = [f"resnet.encoder.stages.{i % 4}.layers.{i}.layer.0.normalization" for i in range(50)]
MADE = {"many": lambda: diagnoses.spoiled(LONG), "few": diagnoses.small, "hostile": diagnoses.hostile}

WIDER = """[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll') || e.matches('.scroll'))
    .filter((e) => !e.closest('svg') || e.matches('svg'))
    .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map((e) => e.outerHTML.slice(0, 80))"""

# Pairs of boxes side by side that overlap: cells of the map, layers, charts, lines of the gap, texts of a chart.
OVERLAPS = """['.cell', '.layer', '.panel', '.bars div', '.verdict', '.row'].flatMap((name) => {
    const shown = [...document.querySelectorAll(name)].filter((e) => e.offsetParent);
    const boxes = shown.map((e) => e.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 0.5 && b.left < a.right - 0.5
      && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5;
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => meet(a, b)).map(() => name));
  })"""
TEXTS = """[...document.querySelectorAll('.panel svg')].filter((s) => s.checkVisibility()).flatMap((svg) => {
    const boxes = [...svg.querySelectorAll('text')].filter((t) => t.textContent).map((t) => t.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
      a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(() => svg.ariaLabel));
  })"""
CUT = """[...document.querySelectorAll('.cell, .layer h3, .badge')]
    .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""


# The contrast of each cell's text with its ground, as WCAG defines it.
CONTRAST = """(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = (color) => {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = (color) => {
      const [r, g, b] = rgb(color).map((v) => linear(v / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    return [...document.querySelectorAll('.cell')].map((e) => {
      const style = getComputedStyle(e);
      const [a, b] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
      return (b + 0.05) / (a + 0.05);
    });
  })()"""


@pytest.fixture(scope="module", params=MADE)
def path(request, tmp_path_factory):
    return MADE[request.param]().to_html(tmp_path_factory.mktemp("diagnosis") / "page.html")


@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_and_nothing_overlaps(browser, path, width):
    page = Page(browser, path.as_uri(), width=width)
    page.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    page.settle()
    assert page.run(WIDER) == []
    assert page.run(OVERLAPS) == []
    assert page.run(TEXTS) == []
    assert page.run(CUT) == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.troubles() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [path.as_uri()]
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_can_be_read(browser, path, scheme):
    page = Page(browser, path.as_uri(), scheme=scheme)
    assert min(page.run(CONTRAST)) >= 4.5
    page.close()


def test_a_cell_leads_to_its_layer_also_where_it_is_folded(browser, tmp_path):
    path = diagnoses.spoiled(LONG).to_html(tmp_path / "page.html")
    page = Page(browser, path.as_uri())
    page.run("[...document.querySelectorAll('details.whole')][0].open = true")
    page.run("[...document.querySelectorAll('a.cell')][3].click()")
    page.settle()
    assert page.run("document.querySelector('.layer:target').getBoundingClientRect().top < innerHeight")
    page.close()
