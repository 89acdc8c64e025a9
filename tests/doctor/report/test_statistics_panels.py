import math
import re

import pytest

from normkit.doctor.report.statistics_panels import SIDE, panels
from support import diagnoses


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.e+-]+) ([\d.e+-]+)h0", path)]


def made(mean, var, data_mean, data_var, **more):
    return {"stored_mean": mean, "stored_var": var, "data_mean": data_mean, "data_var": data_var, **more}


def test_equal_statistics_lie_on_the_diagonal():
    layer = diagnoses.layer("bn")
    same = made(layer["data_mean"], layer["data_var"], layer["data_mean"], layer["data_var"])
    for panel in panels(same):
        drawn = points(panel.near)
        assert len(drawn) > 8
        assert panel.far == ""
        assert [x + y for x, y in drawn] == pytest.approx([SIDE] * len(drawn), abs=1.0)  # a step of each coordinate
        assert panel.summary == "off by at most 0 σ"  # noqa: RUF001, the letter


def test_wrong_channels_are_set_off_and_the_worst_is_named():
    mean, deviation = panels(made([0.0, 0.4, 3.0], [1.0, 1.0, 4.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], eps=1e-12))
    assert (len(points(mean.near)), len(points(mean.far))) == (2, 1)
    assert (len(points(deviation.near)), len(points(deviation.far))) == (1, 1)  # two channels are one point
    assert "at most 3 σ" in mean.summary  # noqa: RUF001, the letter
    assert "at most 1 σ" in deviation.summary  # noqa: RUF001, the letter


def test_higher_is_higher_and_all_points_are_inside():
    for panel in panels(diagnoses.layer("bn", off=2.0, channels=64)):
        drawn = points(panel.near + panel.far)
        assert all(0 <= value <= SIDE for point in drawn for value in point)
        assert all(x + y < SIDE + 1 for x, y in points(panel.far))  # stored is larger: above the diagonal


def test_what_cannot_be_drawn_is_counted():
    mean, deviation = panels(made([math.nan, 0.0, 1.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]))
    assert "1 not drawn" in mean.summary
    assert "2 not drawn" in deviation.summary
    hidden = panels(made([math.nan], [math.nan], [0.0], [1.0]))
    assert [panel.summary.split(":")[0] for panel in hidden] == ["no channel can be drawn"] * 2
    assert [(panel.low, panel.high) for panel in hidden] == [("", "")] * 2


def test_a_dead_channel_is_not_infinitely_far_off():
    mean, _ = panels(made([1e-9], [1e-9], [0.0], [0.0]))
    assert mean.far == ""


def test_words_of_json_are_numbers():
    mean, _ = panels(made(["nan", 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]))
    assert "1 not drawn" in mean.summary


def test_thousands_of_channels_take_no_more_room_than_the_chart_has():
    _, deviation = panels(diagnoses.layer("bn", channels=5000))
    assert len(deviation.near) < 40_000


@pytest.mark.parametrize("layer", [
    {}, {"stored_var": None, "data_var": None}, {"stored_var": [1.0], "data_var": None},
    {"stored_var": [1.0, 1.0], "data_var": [1.0]},
])  # fmt: skip
def test_a_layer_without_both_statistics_has_no_chart(layer):
    assert panels(layer) == []


def test_a_layer_that_stores_a_variance_alone_has_one_chart():
    (deviation,) = panels({"stored_var": [1.0], "data_var": [1.0]})
    assert deviation.title == "standard deviation"
