import math

from normkit.figures import Curve, Figure, write_png


def test_what_lies_above_a_floor_keeps_its_range():
    curve = Curve("a", [1, 2, 3, 4], [0.1, 0.5, math.nan, 0.9], [0.0, 0.4, 0.0, 0.8], [0.2, 0.6, 0.0, 1.0])
    assert curve.above(0.5) == Curve("a", [2, 4], [0.5, 0.9], [0.4, 0.8], [0.6, 1.0])
    assert Curve("a", [1, 2], [0.1, 0.5]).above(0.2) == Curve("a", [2], [0.5])


def test_a_notebook_shows_a_figure_as_its_image(tmp_path):
    figure = Figure("A title", "steps", "loss", [Curve("a", [1, 2], [0.1, 0.5])])
    assert figure._repr_png_() == write_png(figure, tmp_path / "figure.png").read_bytes()
