"""Plots are made of records alone: made-up ones show what is drawn, and those of a run that all probes are known."""

import io
import json
import math

import pytest
import torch
from PIL import Image
from torch import nn

from normkit.errors import ArgumentError
from normkit.figures import Curve
from normkit.instruments import attach, probes
from normkit.instruments.plots import plot, report
from normkit.instruments.plots.plot import AXES, MOST_LAYERS
from support.html_reader import Reader


def records(probe="GradientNorms", layers=("a", "b"), steps=(0, 100, 200), **numbers):
    return [
        {"step": step, "probe": probe, "layer": layer, **{key: of(layer, step) for key, of in numbers.items()}}
        for step in steps
        for layer in layers
    ]


def gradients(**options):
    return records(gradient=lambda layer, step: 10.0 ** (-step / 100), weight=lambda layer, step: 1 + step, **options)


def test_each_number_has_a_figure_and_each_layer_a_curve():
    first, second = plot(gradients(), "GradientNorms").figures
    assert (first.title, first.x_title, first.y_title) == ("GradientNorms: gradient", "steps", "norm of the gradient")
    assert first.curves == [Curve(name, [0.0, 100.0, 200.0], [1.0, 0.1, 0.01]) for name in "ab"]
    assert (second.y_title, [curve.name for curve in second.curves]) == ("norm of the parameters", ["a", "b"])


def test_steps_are_in_their_order_and_other_probes_left_alone():
    mixed = [*reversed(gradients()), *records("DeadUnits", dead=lambda *_: 0.5)]
    assert plot(mixed, "GradientNorms", layers="a", keys="weight").figures[0].curves == [
        Curve("a", [0.0, 100.0, 200.0], [1.0, 101.0, 201.0])
    ]


def test_layers_and_numbers_are_chosen_by_name_and_by_pattern():
    of = gradients(layers=("conv.0", "conv.1", "fc", "odd[0]"))
    (only,) = plot(of, "GradientNorms", layers=["conv.*", "odd[0]"], keys=["weight"]).figures
    assert [curve.name for curve in only.curves] == ["conv.0", "conv.1", "odd[0]"]


def test_the_model_as_a_whole_has_a_name():
    (figure,) = plot(records("Landscape", layers=("",), loss=lambda *_: 2.0), "Landscape").figures
    assert [curve.name for curve in figure.curves] == ["the model"]


def test_what_is_not_finite_stays_and_what_was_not_measured_is_a_gap_or_left_out():
    values = [None, 1.0, math.nan, None, math.inf, 2.0, None]
    of = records(layers="a", steps=range(7), ratio=lambda _, step: values[step])
    (curve,) = plot(of, "GradientNorms").figures[0].curves
    assert list(curve.x) == [1, 2, 3, 4, 5]
    assert [curve.y[0], *map(math.isnan, curve.y[1:3]), *curve.y[3:]] == [1.0, True, True, math.inf, 2.0]


def test_layers_and_numbers_that_were_never_measured_are_left_out():
    of = records(dead=lambda *_: 0.1, saturated=lambda layer, _: 0.2 if layer == "b" else None, zero=lambda *_: None)
    figures = plot(of, "GradientNorms").figures
    assert [[curve.name for curve in figure.curves] for figure in figures] == [["a", "b"], ["b"]]


@pytest.mark.parametrize(("values", "is_log"), [
    ([1.0, 0.1, 0.01], True), ([1.0, 0.5, 0.4], False), ([1.0, 0.0, 0.01], False), ([1.0, math.nan, 0.01], True),
    ([math.nan] * 3, False),
])  # fmt: skip
def test_an_axis_is_logarithmic_where_that_shows_more_and_hides_nothing(values, is_log):
    of = records(layers="a", gradient=lambda _, step: values[step // 100])
    assert plot(of, "GradientNorms").figures[0].log_y is is_log


def test_what_lies_between_bounds_is_not_logarithmic():
    of = records("DeadUnits", layers="a", dead=lambda _, step: 10.0 ** (-step / 100))
    assert not plot(of, "DeadUnits").figures[0].log_y


def test_unknown_probes_and_numbers_go_by_their_names():
    (figure,) = plot(records("MyProbe", furrow=lambda *_: 1.0), "MyProbe").figures
    assert (figure.title, figure.y_title, figure.log_y) == ("MyProbe: furrow", "furrow", False)


def quantiles(count):
    names = [f"layer{i}" for i in range(count)]
    return names, records("ActivationQuantiles", names, q15=lambda *_: -1.0, q50=lambda *_: 0.0, q85=lambda *_: 1.0)


def test_quantiles_have_a_figure_for_each_layer():
    names, of = quantiles(MOST_LAYERS)
    figures = plot(of, "ActivationQuantiles").figures
    assert [figure.title for figure in figures] == [f"ActivationQuantiles: {name}" for name in names]
    assert {tuple(curve.name for curve in figure.curves) for figure in figures} == {("q15", "q50", "q85")}
    assert {figure.note for figure in figures} == {""}


def test_many_layers_are_chosen_evenly_and_the_rest_counted():
    names, of = quantiles(45)
    figures = plot(of, "ActivationQuantiles").figures
    assert [f.title.split()[1] for f in figures] == [f"layer{i}" for i in range(0, 45, 4)]
    assert "12 of 45 layers, evenly chosen; 33 are left out" in figures[0].note
    assert len(plot(of, "ActivationQuantiles", layers="*").figures) == 45
    assert [f.title for f in plot(of, "ActivationQuantiles", layers=names[7]).figures] == [
        "ActivationQuantiles: layer7"
    ]


def test_a_figure_has_no_more_curves_than_can_be_told_apart():
    of = records(layers=[f"layer{i}" for i in range(45)], gradient=lambda *_: 1.0)
    (figure,) = plot(of, "GradientNorms").figures
    assert [curve.name for curve in figure.curves] == [f"layer{i}" for i in range(0, 45, 4)]
    assert "12 of 45 layers, evenly chosen; 33 are left out" in figure.note
    assert len(plot(of, "GradientNorms", layers="*").figures[0].curves) == 45


@pytest.mark.parametrize(("options", "said"), [
    ({"probe": "GradientNorm"}, "no records of 'GradientNorm'; there are GradientNorms. Did you mean \"GradientNorms"),
    ({"layers": "c"}, "no layer 'c' in these records; there are a, b"),
    ({"keys": "gradients"}, r"no number 'gradients'.*there are gradient, weight. Did you mean \"gradient\""),
    ({"layers": []}, "no value to draw"),
])  # fmt: skip
def test_what_is_not_there_is_named_with_what_is(options, said):
    with pytest.raises(ArgumentError, match=said):
        plot(gradients(), **{"probe": "GradientNorms"} | options)


def test_numbers_without_a_value_are_an_error():
    with pytest.raises(ArgumentError, match="GradientNorms has no value to draw"):
        plot([*gradients(), *records(ratio=lambda *_: None)], "GradientNorms", keys="ratio")
    with pytest.raises(ArgumentError, match=r"no records of 'DeadUnits'; there are none\."):
        plot([], "DeadUnits")


def test_a_plot_is_a_page_and_an_image(tmp_path):
    drawn = plot(gradients(), "GradientNorms")
    page = Reader(drawn.html(tmp_path / "new" / "p.html").read_text(encoding="utf-8"))
    assert [e["text"] for e in page.of("h3")] == [figure.title for figure in drawn.figures]
    path = drawn.png(str(tmp_path / "p.png"), 400)
    assert drawn.png(tmp_path / "again.png", 400).read_bytes() == path.read_bytes()
    single = plot(gradients(), "GradientNorms", keys="weight").png(tmp_path / "one.png", 400)
    both, one = (Image.open(io.BytesIO(p.read_bytes())) for p in (path, single))
    assert (both.width, one.width) == (400, 400)
    assert both.height > 1.8 * one.height
    assert drawn._repr_png_().startswith(b"\x89PNG")


def test_a_report_has_all_probes_figures(tmp_path):
    empty = records("DeadUnits", saturated=lambda *_: None)
    path = report([*gradients(), *empty, *quantiles(2)[1]], tmp_path / "r.html", title="a <run>")
    page = Reader(path.read_text(encoding="utf-8"))
    assert page.of("h2")[0]["text"] == "a <run>"
    assert [e["text"] for e in page.of("h3")] == [
        "GradientNorms: gradient",
        "GradientNorms: weight",
        "ActivationQuantiles: layer0",
        "ActivationQuantiles: layer1",
    ]
    assert "18 records of GradientNorms, DeadUnits, ActivationQuantiles; steps 0 to 200." in page.of("main")[0]["text"]
    with pytest.raises(ArgumentError, match="a report needs records; got none"):
        report([], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


@pytest.fixture(scope="module")
def run():
    """A short training that all probes watch."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01)
    x, y = torch.randn(32, 4), torch.randint(3, (32,))

    def loss():
        return nn.functional.cross_entropy(model(x), y)

    given = {"CovariateShift": loss, "Landscape": loss, "BatchCoupling": x, "BoundaryDistances": x}
    kinds = [name for name in probes.__all__ if name not in ("Probe", "ForwardProbe")]
    made = [getattr(probes, name)(*([given[name]] if name in given else [])) for name in kinds]
    with attach(model, made, every=1, optimizer=optimizer) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    assert recorder.stopped == {}
    return recorder


def test_every_number_of_every_probe_has_an_axis_in_words(run):
    seen = {}
    for record in run.records:
        seen.setdefault(record["probe"], set()).update(record.keys() - {"step", "probe", "layer"})
    assert seen.pop("ActivationQuantiles") == {"q15", "q50", "q85"}
    assert {probe: set(axes) for probe, axes in AXES.items()} == seen
    assert [title for axes in AXES.values() for title, _ in axes.values() if "_" in title] == []


def test_a_recorder_s_own_records_are_drawn(run, tmp_path):
    for probe in run.seconds:
        assert run.plot(probe).figures
    page = Reader(report(run.records, tmp_path / "r.html").read_text(encoding="utf-8"))
    drawn = json.loads(page.of("script", id="figures")[0]["text"])
    assert len(drawn) == sum(len(run.plot(probe).figures) for probe in run.seconds)
