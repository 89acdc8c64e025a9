"""Images, decoded again: curves where they belong, in the report's colours, with nothing over them."""

import io
import math
import sys

import numpy
import pytest
from PIL import Image

from normkit.errors import ArgumentError, MissingExtraError
from normkit.figures import Curve, Figure, write_png, write_stack
from normkit.figures.arrangement import OVERSAMPLING, arrange
from normkit.figures.drawing import COLOURS, styles
from normkit.figures.lettering import ELLIPSIS
from normkit.figures.palette import band_alpha, light_colour
from normkit.figures.png import png_bytes
from support import report_samples

STEPS = [float(step) for step in range(0, 101, 10)]
FIRST, SECOND = light_colour("c0")[:3], light_colour("c1")[:3]
LONG = "backbone.stages.3.blocks.11.attention.projection.norm." * 3


def flat(name="a", height=1.0, **options):
    return Curve(name, STEPS, [height] * len(STEPS), **options)


def figure(*curves, **options):
    return Figure("A title", "steps", "norm of the gradient", curves, **options)


def drawn(of, width=800):
    return decoded(png_bytes([of], width))


def decoded(content):
    image = Image.open(io.BytesIO(content))
    assert (image.format, image.mode) == ("PNG", "RGB")
    return image


def plan_of(of, width=800):
    return arrange(of, width, styles([of]))


def in_pixels(box):
    return tuple(round(edge / OVERSAMPLING) for edge in box)


def plot_area(of, width=800):
    return drawn(of, width).crop(in_pixels(plan_of(of, width).plot))


def columns_with(image, colour):
    """Which columns of pixels have this colour."""
    return set(numpy.flatnonzero((numpy.asarray(image) == colour).all(2).any(0)).tolist())


def column_of(of, x, width=800):
    """The column of the plot area that a value lies in."""
    plan = plan_of(of, width)
    return round((plan.point(x, plan.y.low)[0] - plan.plot.left) / OVERSAMPLING)


@pytest.mark.parametrize("width", [240, 400, 800])
def test_an_image_is_as_wide_as_asked_and_as_high_as_arranged(width, tmp_path):
    of = report_samples.accuracy_figure()
    path = write_png(of, tmp_path / "new" / "f.png", width)
    assert decoded(path.read_bytes()).size == (width, plan_of(of, width).height // OVERSAMPLING)


@pytest.mark.parametrize("width", [400, 800])
def test_letters_are_large_enough(width):
    plan = plan_of(report_samples.accuracy_figure(), width)
    sizes = {text.font.face.size / OVERSAMPLING for text in plan.texts}
    assert min(sizes) >= max(12, width / 50)


def test_a_curve_is_in_the_plot_area_in_its_colour():
    area = plot_area(figure(flat("a", 1.0), flat("b", 2.0)))
    for colour in (FIRST, SECOND):
        assert len(columns_with(area, colour)) > 0.9 * area.width
    assert columns_with(area, light_colour("c2")[:3]) == set()


def test_the_legend_is_below_and_leaves_the_curves_alone():
    short = figure(*(flat(str(i), i) for i in range(30)))
    long = figure(*(flat(f"{i}.{LONG}", i) for i in range(30)))
    for of in (short, long):
        plan = plan_of(of)
        assert plan.legend.top > plan.plot.bottom
        assert all(plan.legend.top <= entry.sample.top <= entry.sample.bottom <= plan.height for entry in plan.entries)
        legend = drawn(of).crop(in_pixels(plan.legend))
        assert columns_with(legend, FIRST) != set()
    assert plot_area(short).tobytes() == plot_area(long).tobytes()


@pytest.mark.parametrize("width", [240, 400, 800])
def test_every_text_is_inside_the_image_and_off_the_curves(width):
    curves = [Curve(LONG + str(i), [0, 12_345_678], [-1e-9 * i, 1e12]) for i in range(9)]
    plan = plan_of(Figure(LONG + " and words" * 20, LONG, LONG, curves, note="words " * 60), width)
    for text in plan.texts:
        left, top, right, bottom = text.font.face.getbbox(text.text, anchor=text.anchor)
        x, y = text.at
        assert x + left >= 0
        assert x + right <= plan.width
        assert 0 <= y + top <= y + bottom <= plan.height
        is_above, is_below = y + bottom <= plan.plot.top, y + top >= plan.plot.bottom
        assert is_above or is_below or x + right <= plan.plot.left


def test_a_long_name_is_elided_in_the_middle():
    texts = [text.text for text in plan_of(figure(flat(LONG)), 400).texts if ELLIPSIS in text.text]
    assert len(texts) == 1
    assert texts[0].startswith("backbone.")
    assert texts[0].endswith("norm.")


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_leaves_a_gap(hole):
    of = figure(Curve("a", STEPS, [hole if step == 50 else 1.0 for step in STEPS]))
    there = columns_with(plot_area(of), FIRST)
    assert there.isdisjoint(range(column_of(of, 42), column_of(of, 58)))
    assert all(column_of(of, x) in there for x in (5, 20, 39, 61, 95))


def test_zero_leaves_a_gap_on_a_logarithmic_axis_only():
    for log_y in (False, True):
        of = figure(Curve("a", STEPS, [0.0 if step == 50 else 1.0 + step for step in STEPS]), log_y=log_y)
        assert (column_of(of, 50) in columns_with(plot_area(of), FIRST)) is not log_y


def test_a_point_alone_is_a_symbol():
    of = figure(Curve("a", [50.0], [1.0]), flat("b", 2.0), Curve("c", [70.0], [1.0], is_published=True))
    area = plot_area(of)
    for colour, at in ((FIRST, 50), (light_colour("c2")[:3], 70)):
        there = columns_with(area, colour)
        assert column_of(of, at) in there
        assert 4 < len(there) < 20


def test_a_logarithmic_axis_puts_factors_at_equal_distances():
    of = figure(Curve("a", [1, 10, 100], [1.0, 10.0, 100.0]), log_x=True, log_y=True)
    plan = plan_of(of)
    first, second, third = (plan.point(10.0**k, 10.0**k) for k in range(3))
    assert second[0] - first[0] == pytest.approx(third[0] - second[0])
    assert second[1] - first[1] == pytest.approx(third[1] - second[1])
    assert [text for _, text in plan.y_ticks] == ["1", "10", "100"]
    assert [text for _, text in plan.x_ticks] == ["1", "10", "100"]


def test_a_band_shines_through():
    of = figure(flat("a", 1.0, low=[0.0] * len(STEPS), high=[2.0] * len(STEPS)))
    image, plan = drawn(of), plan_of(of)
    x, y = (round(v / OVERSAMPLING) for v in plan.point(33.0, 1.63))
    mixed = [round(b + band_alpha() * (c - b)) for c, b in zip(FIRST, light_colour("ground"), strict=False)]
    assert image.getpixel((x, y)) == pytest.approx(mixed, abs=2)
    x, y = (round(v / OVERSAMPLING) for v in plan.point(33.0, 2.08))
    assert image.getpixel((x, y)) == light_colour("ground")[:3]


def test_what_was_published_is_dashed():
    of = figure(flat("a", is_published=True))
    area = plot_area(of)
    there = columns_with(area, FIRST)
    ends = [x for x in there if x + 1 not in there]
    assert len(ends) > 10
    assert 0.4 * area.width < len(there) < 0.8 * area.width


def test_labels_beside_each_other_do_not_touch():
    of = figure(Curve("a", [0, 123_456_789], [0.0, 1.0]))
    for width in (240, 400, 800):
        plan = plan_of(of, width)
        font = plan.texts[0].font
        places = [plan.point(value, 0.0)[0] for value, _ in plan.x_ticks]
        widths = [font.width(text) for _, text in plan.x_ticks]
        for i in range(len(places) - 1):
            assert places[i] + widths[i] / 2 < places[i + 1] - widths[i + 1] / 2


@pytest.mark.parametrize("of", [
    figure(), figure(Curve("a", [], [])), figure(Curve("a", [1.0], [math.nan])), figure(flat(), log_y=True),
    figure(Curve("a", STEPS, [-1.0] * len(STEPS)), log_y=True), Figure("", "", "", []),
    figure(*(flat(f"curve {i}", i) for i in range(3 * COLOURS))), report_samples.loss_figure(),
    report_samples.hostile_findings().figures[0],
])  # fmt: skip
def test_odd_figures_are_drawn(of):
    assert drawn(of, 400).width == 400


def test_the_same_figure_is_the_same_file():
    of = report_samples.accuracy_figure()
    assert png_bytes([of]) == png_bytes([of])


def test_a_stack_has_one_figure_below_the_other_and_one_colour_for_a_name(tmp_path):
    first, second = figure(flat("a"), flat("b", 2.0)), figure(flat("b", 2.0), note="again")
    image = decoded(write_stack([first, second], tmp_path / "s.png", 400).read_bytes())
    heights = [plan_of(of, 400).height // OVERSAMPLING for of in (first, second)]
    assert image.size == (400, sum(heights))
    assert image.crop((0, 0, 400, heights[0])).tobytes() == drawn(first, 400).tobytes()
    lower = image.crop((0, heights[0], *image.size))
    assert columns_with(lower, SECOND) != set()
    assert columns_with(lower, FIRST) == set()


@pytest.mark.parametrize(("figures", "width", "said"), [
    ([], 800, "got 0 figures and 800"), ([figure()], 100, "240 pixels or more; got 1 figures and 100"),
    ([figure()], "800", "'800'"),
])  # fmt: skip
def test_what_cannot_be_an_image_is_refused(figures, width, said, tmp_path):
    with pytest.raises(ArgumentError, match=said):
        write_stack(figures, tmp_path / "f.png", width)
    assert not (tmp_path / "f.png").exists()


def test_a_missing_pillow_is_named_with_its_extra(monkeypatch):
    for name in ("PIL.Image", "PIL.ImageFont", "PIL.ImageDraw"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"An image needs pillow.*pip install 'normkit\[lab\]'"):
        png_bytes([figure(flat())])
