"""The page in a real browser: quiet, offline, drawn, and readable wherever it is shown."""

import base64

import pytest

from normkit.figures import Curve, Figure, write_page
from normkit.lab.findings import Findings
from normkit.lab.report import Section, write_report
from support import report_samples
from support.browser import Page

pytestmark = pytest.mark.deep

DRAWN = [figure for section in report_samples.sections() for figure in section.findings.figures]
COLOUR = "getComputedStyle(document.documentElement).backgroundColor"
AXIS = "getComputedStyle(document.querySelector('.xtick text')).fill"


@pytest.fixture
def open_page(browser, report):
    opened = []

    def of(**options):
        opened.append(Page(browser, report.as_uri(), **options))
        return opened[-1]

    yield of
    for page in opened:
        page.close()


@pytest.fixture(scope="module")
def page(browser, report):
    """A page that its tests leave as it was."""
    opened = Page(browser, report.as_uri())
    yield opened
    opened.close()


def traces(page):
    return page.run("[...document.querySelectorAll('.chart')].map((p) => p.querySelectorAll('.trace').length)")


def test_it_loads_without_trouble_and_asks_for_nothing(page, report):
    assert page.troubles() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [report.as_uri()]


def test_every_figure_is_drawn_with_all_its_curves_and_bands(page):
    assert page.run("[...document.querySelectorAll('.chart')].every((p) => p.querySelector('svg.main-svg'))")
    with_bands = [len(f.curves) + sum(c.low is not None for c in f.curves) for f in DRAWN]
    assert traces(page) == with_bands
    dashed = "[...document.querySelectorAll('.chart .js-line')].filter((l) => l.style.strokeDasharray).length"
    assert page.run(dashed) == sum(curve.is_published for f in DRAWN for curve in f.curves)


def test_a_logarithmic_axis_is_labelled_at_powers_of_ten(browser, tmp_path):
    figure = Figure(
        "rates", "rate", "accuracy", [Curve("BN", [0.001, 0.0316, 1.0, 31.6], [0.1, 0.8, 0.8, 0.1])], log_x=True
    )
    section = Section(report_samples.paper_run(), Findings("", "", "unclear", [], figures=[figure]), "title", "")
    page = Page(browser, write_report([section], tmp_path / "r.html").as_uri())
    labels = page.run(
        "[...document.querySelectorAll('.xtick text')].map((t) => t.textContent.replaceAll('\\u200b', ''))"
    )
    assert labels == ["10−3", "10−2", "10−1", "1", "10"]  # noqa: RUF001, the sign and not the hyphen
    assert page.troubles() == []
    page.close()


def test_a_short_logarithmic_axis_is_labelled_at_its_points(browser, tmp_path):
    figure = Figure("batches", "batch", "error", [Curve("BN", [2.0, 8.0, 32.0], [0.3, 0.2, 0.1])], log_x=True)
    page = Page(browser, write_page("batches", "", [figure], [], tmp_path / "p.html").as_uri())
    labels = page.run(
        "[...document.querySelectorAll('.xtick text')].map((t) => t.textContent.replaceAll('\\u200b', ''))"
    )
    assert labels == ["2", "8", "32"]
    assert page.troubles() == []
    page.close()


@pytest.mark.parametrize(("heights", "labels"), [
    ([0.001, 31.6], ["10−3", "10−2", "10−1", "1", "10"]),  # noqa: RUF001, the sign and not the hyphen
    ([2.0, 20.0], ["2", "5", "10", "2"]),
])  # fmt: skip
def test_a_page_of_figures_draws_logarithmic_heights(browser, tmp_path, heights, labels):
    figure = Figure("norms", "steps", "norm", [Curve("a", [0.0, 1.0], heights)], log_y=True)
    page = Page(browser, write_page("norms", "", [figure], [], tmp_path / "p.html").as_uri())
    shown = page.run(
        "[...document.querySelectorAll('.ytick text')].map((t) => t.textContent.replaceAll('\\u200b', ''))"
    )
    assert page.troubles() == []
    assert [label for label in labels if label not in shown] == []
    page.close()


def test_one_name_has_one_colour_in_all_figures(page):
    lines = page.run(
        "[...document.querySelectorAll('.chart')].map((p) => p._fullData.filter((t) => t.mode !== 'lines' || "
        "t.line.dash === 'dash').map((t) => [t.name.replace(' (published)', ''), t.line.color]))"
    )
    pairs = {tuple(pair) for figure in lines for pair in figure}
    assert len(pairs) == len({name for name, _ in pairs}) == len({c.name for f in DRAWN for c in f.curves})


@pytest.mark.parametrize(("figure", "curve", "point", "words"), [
    (0, "BN-x5", 2, ["BN-x5", "steps: 2,000", "accuracy: 0.31", "("]),
    (2, report_samples.HOSTILE, 0, ["<b>&amp; %{x} [red]", "0.5"]),
], ids=["plain", "hostile"])  # fmt: skip
def test_hovering_shows_arm_step_and_value(page, figure, curve, point, words):
    index = next(i for i, c in enumerate(DRAWN[figure].curves) if c.name == curve)
    x, y = page.run(
        f"""(() => {{
          const plot = document.querySelectorAll('.chart')[{figure}];
          plot.scrollIntoView({{block: 'center'}});
          const trace = plot._fullData[plot._fullData.length - {len(DRAWN[figure].curves)} + {index}];
          const box = plot.getBoundingClientRect();
          const at = (axis, value) => axis._offset + axis.l2p(value);
          const {{xaxis, yaxis}} = plot._fullLayout;
          return [box.x + at(xaxis, trace.x[{point}]), box.y + at(yaxis, trace.y[{point}])];
        }})()"""
    )
    page.hover(x, y)
    label = page.run(f"document.querySelectorAll('.chart')[{figure}].querySelector('.hoverlayer').textContent")
    assert [word for word in words if word not in label] == []
    assert page.troubles() == []


def test_a_name_in_the_legend_hides_and_shows_its_curve_and_band(page):
    before = traces(page)
    page.run("document.querySelector('.key').click()")
    assert traces(page)[0] == before[0] - 2
    assert page.run("document.querySelector('.key').getAttribute('aria-pressed')") == "false"
    page.run("document.querySelector('.key').click()")
    assert traces(page) == before


def test_dark_is_dark_from_the_start_and_when_it_comes(open_page):
    page = open_page(scheme="dark")
    dark = page.run(COLOUR), page.run(AXIS)
    page.emulate(scheme="light")
    page.settle()
    light = page.run(COLOUR), page.run(AXIS)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.emulate(scheme="dark")
    page.settle()
    assert (page.run(COLOUR), page.run(AXIS)) == dark
    assert page.troubles() == []


def test_long_names_of_layers_fit_a_phone(browser, tmp_path):
    names = [f"resnet.encoder.stages.{i}.layers.0.layer.0.normalization" for i in range(3)]
    figures = [Figure(f"ActivationQuantiles: {name}", "steps", "", [Curve(name, [0, 1], [0, 1])]) for name in names]
    page = Page(browser, write_page("norms", "", figures, [], tmp_path / "p.html").as_uri(), width=390)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.close()


WIDER = """[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll') || e.matches('.scroll'))
    .filter((e) => !e.closest('svg') || e.matches('.main-svg'))
    .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_page(open_page, width):
    page = open_page(width=1000)
    page.resize(width)
    page.settle()
    assert page.run(WIDER) == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("document.querySelector('.chart svg').clientWidth > 0.85 * document.body.clientWidth - 40")


def test_on_paper_it_is_light_without_controls_and_unfolded(open_page):
    page = open_page(scheme="dark")
    page.emulate(media="print", scheme="dark")
    page.settle()
    shown = "[...document.querySelectorAll('nav, .hint, .figure-numbers')].filter((e) => e.offsetParent).length"
    assert page.run(shown) == 0
    assert page.run("[...document.querySelectorAll('.chart path.point')].every((p) => p.getBoundingClientRect().width)")
    assert page.run("[...document.querySelectorAll('details.settings')].every((d) => d.open)")
    assert page.run("[...document.querySelectorAll('.chart svg.main-svg')].every((s) => s.clientWidth === 660)")
    assert page.run("getComputedStyle(document.documentElement).color") == "rgb(29, 31, 33)"
    page.emulate(scheme="dark")
    page.settle()
    assert not page.run("[...document.querySelectorAll('details.settings')].some((d) => d.open)")
    assert page.run("document.querySelector('.chart svg').clientWidth") > 660


def test_it_prints(open_page):
    page = open_page(scheme="dark")
    assert base64.b64decode(page.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert page.troubles() == []


# ---- the story


@pytest.mark.parametrize("width", [400, 1280])
def test_the_story_fits_and_asks_for_nothing(browser, story, width):
    page = Page(browser, story.as_uri(), width=width)
    assert page.run(WIDER) == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.run("document.querySelectorAll('details.whole').forEach((d) => { d.open = true })")
    page.settle()
    assert page.run(WIDER) == []
    assert page.troubles() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [story.as_uri()]
    page.close()


def test_what_is_folded_is_drawn_when_it_is_unfolded(browser, story):
    page = Page(browser, story.as_uri())
    drawn = "[...document.querySelectorAll('.chart')].map((p) => Boolean(p.querySelector('svg.main-svg')))"
    assert page.run(drawn) == [True, True, False]
    page.run("document.querySelector('#inception details.whole').open = true")
    page.settle()
    assert page.run(drawn) == [True, True, True]
    wide = "document.querySelectorAll('.chart')[2].querySelector('svg').clientWidth > 0.8 * document.body.clientWidth"
    assert page.run(wide)
    page.close()


def test_on_paper_the_story_is_told_without_what_is_folded(browser, story):
    page = Page(browser, story.as_uri())
    page.emulate(media="print")
    page.settle()
    assert page.run("[...document.querySelectorAll('.whole')].filter((e) => e.offsetParent).length") == 0
    assert page.run("[...document.querySelectorAll('.verdict')].every((e) => e.offsetParent)")
    assert page.troubles() == []
    page.close()
