"""One colour for one name everywhere, and what the script is given."""

import math

from normkit.figures import Curve, Figure
from normkit.figures.drawing import COLOURS, SYMBOLS, Style, drawing, keys, styles


def of(*names, **options):
    return Figure("title", "x", "y", [Curve(name, [1.0, 2.0], [1.0, 2.0]) for name in names], **options)


def test_names_beyond_the_colours_differ_in_their_symbols():
    found = styles([of(*(f"arm {i}" for i in range(2 * COLOURS)))])
    assert len(set(found.values())) == 2 * COLOURS
    assert all(style == Style(style.colour % COLOURS, style.symbol % len(SYMBOLS)) for style in found.values())


def test_a_name_has_one_style_in_all_figures():
    found = styles([of("a", "b"), of("c", "b", "a")])
    assert list(found) == ["a", "b", "c"]
    assert len(set(found.values())) == 3


def test_the_script_is_told_which_axes_are_logarithmic():
    for log_x, log_y in ((True, False), (False, True)):
        found = drawing(of("a", log_x=log_x, log_y=log_y), styles([of("a")]))
        assert (found["log_x"], found["log_y"]) == (log_x, log_y)


def test_a_legend_says_where_values_stop():
    curves = [Curve("a", [1, 2, 3], [1.0, math.nan, math.inf]), Curve("b", [1, 2, 3], [1.0, math.nan, 2.0])]
    figure = Figure("title", "steps", "y", curves)
    assert [key.ends for key in keys(figure, styles([figure]))] == ["not finite from steps 2", ""]
