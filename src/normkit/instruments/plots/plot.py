"""Plots of what probes recorded: one look for all of them, and for the lab's reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from normkit.errors import ArgumentError
from normkit.figures.figure import Curve, Figure
from normkit.figures.page import write_page
from normkit.figures.png import png_bytes, write_stack
from normkit.instruments.plots.curves import WHOLE, chosen_keys, chosen_layers, curve_of, evenly, records_of
from normkit.json_lines import Line

STEPS = "steps"
MOST_LAYERS = 12  # that are drawn, if none are named

# Probes with a figure for each layer, in which each number is a curve, and the title of its axis.
_BY_LAYER = {"ActivationQuantiles": "quantiles of the values"}

# Of each probe's numbers, the title of the axis, and whether it is logarithmic.
AXES: dict[str, dict[str, tuple[str, bool]]] = {
    "ActivationMoments": {
        "mean": ("mean of the output", False),
        "std": ("standard deviation of the output", True),
        "mean_drift": ("change of channels' means, standard deviations", True),
        "std_drift": ("change of channels' standard deviations, natural logarithm", True),
    },
    "BatchCoupling": {
        "training": ("movement with batch-mates in training, relative to examples' distances", False),
        "evaluation": ("movement with batch-mates in evaluation, relative to examples' distances", False),
        "batch": ("examples in a batch", False),
    },
    "BoundaryDistances": {
        "median": ("median distance from a boundary, in the space of inputs", True),
        "near": ("tenth percentile of distances from a boundary, in the space of inputs", True),
        "flat": ("share of units and inputs without a gradient", False),
    },
    "CovariateShift": {
        "shift": ("norm of the gradient's change by earlier layers' updates", True),
        "relative": ("gradient's change by earlier layers' updates, over its norm", True),
        "cosine": ("cosine of the gradients before and after earlier layers' updates", False),
    },
    "DeadUnits": {
        "dead": ("share of dead units", False),
        "zero": ("share of values that are zero", False),
        "saturated": ("share of saturated values", False),
    },
    "EffectiveRate": {
        "norm": ("norm of the weights", True),
        "gradient": ("norm of the gradient", True),
        "radial": ("cosine of weights and gradient", False),
        "angle": ("angle per step, radians", True),
        "rate": ("learning rate", True),
        "effective_rate": ("learning rate over the squared norm of the weights", True),
        "equilibrium_norm": ("norm of the weights in equilibrium", True),
        "equilibrium_angle": ("angle per step in equilibrium, radians", True),
    },
    "GradientNorms": {
        "gradient": ("norm of the gradient", True),
        "weight": ("norm of the parameters", True),
        "ratio": ("norm of the gradient over that of the parameters", True),
    },
    "Landscape": {
        "loss": ("loss", False),
        "loss_low": ("least loss along the gradient", False),
        "loss_high": ("greatest loss along the gradient", True),
        "gradient": ("norm of the gradient", True),
        "change_low": ("least change of the gradient along itself, norm", True),
        "change_high": ("greatest change of the gradient along itself, norm", True),
        "smoothness": ("greatest change of the gradient over the distance moved", True),
    },
    "StatisticsNoise": {
        "mean_noise": ("distance of the batch's means from the population's, standard deviations", True),
        "std_noise": ("ratio of the batch's standard deviations to the population's, natural logarithm", True),
        "expected": ("noise of means of independent values, standard deviations", True),
        "values": ("values of a channel in a batch", True),
        "stored_gap": ("distance of the batch's means from the running means, standard deviations", True),
    },
}


@dataclass(frozen=True)
class Plot:
    """Figures of one probe's records, to be looked at, or written as a page or an image."""

    probe: str
    figures: list[Figure]

    def html(self, path: str | Path) -> Path:
        """Write a page that works offline."""
        return write_page(self.probe, "", self.figures, [], Path(path))

    def png(self, path: str | Path, width: int = 800) -> Path:
        """Write an image of this width, in pixels: several figures are one below the other."""
        return write_stack(self.figures, path, width)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return png_bytes(self.figures)


def plot(
    records: Iterable[Line],
    probe: str,
    *,
    layers: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
) -> Plot:
    """Draw what a probe recorded: a figure for each of its numbers over steps, with a curve for each layer.

    Of ActivationQuantiles there is a figure for each layer instead, with a curve for each quantile.

    Args:
        records: those of a recorder, or of a file: `read_records(path)`.
        probe: its name, "GradientNorms".
        layers: names or shell patterns; without it all, or twelve evenly chosen ones of more.
        keys: which of the probe's numbers; without it, all that were measured.
    """
    figures = _figures(records_of(records, probe), probe, layers, keys)
    if not figures:
        raise ArgumentError(f"{probe} has no value to draw: all that it recorded of these layers and numbers is None.")
    return Plot(probe, figures)


def report(records: Iterable[Line], path: str | Path, title: str = "What probes recorded") -> Path:
    """Write one page with the figures of all probes."""
    records = list(records)
    probes = list(dict.fromkeys(str(record["probe"]) for record in records))
    if not probes:
        raise ArgumentError("a report needs records; got none. Give those of a recorder, or read_records(path).")
    figures = [figure for probe in probes for figure in _figures(records_of(records, probe), probe)]
    steps = [record["step"] for record in records]
    lead = f"{len(records):,} records of {', '.join(probes)}; steps {min(steps):,} to {max(steps):,}."
    return write_page(title, lead, figures, [], Path(path))


def _figures(
    records: Sequence[Line],
    probe: str,
    layers: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
) -> list[Figure]:
    """All figures of one probe that have a curve."""
    names, numbers = chosen_layers(records, layers), chosen_keys(records, keys)
    shown = evenly(names, MOST_LAYERS) if layers is None else names
    if probe in _BY_LAYER:
        figures = [_figure_of_layer(records, probe, name, numbers) for name in shown]
    else:
        figures = [_figure_of_number(records, probe, key, shown) for key in numbers]
    return _with_note([figure for figure in figures if figure.curves], len(shown), len(names))


def _figure_of_number(records: Sequence[Line], probe: str, key: str, layers: Sequence[str]) -> Figure:
    """A number of all layers."""
    title, is_log = AXES.get(probe, {}).get(key, (key, False))
    found = [curve_of(records, layer, key, layer or WHOLE) for layer in layers]
    curves = [curve for curve in found if curve is not None]
    return Figure(f"{probe}: {key}", STEPS, title, curves, log_y=is_log and _spans_decades(curves))


def _figure_of_layer(records: Sequence[Line], probe: str, layer: str, keys: Sequence[str]) -> Figure:
    """All numbers of a layer."""
    found = [curve_of(records, layer, key, key) for key in keys]
    curves = [curve for curve in found if curve is not None]
    return Figure(f"{probe}: {layer or WHOLE}", STEPS, _BY_LAYER[probe], curves)


def _with_note(figures: list[Figure], shown: int, there: int) -> list[Figure]:
    """Say in the first figure that layers were left out."""
    if not figures or shown == there:
        return figures
    note = f"{shown} of {there} layers, evenly chosen; {there - shown} are left out. Name those to draw with layers=."
    return [replace(figures[0], note=note), *figures[1:]]


def _spans_decades(curves: Sequence[Curve]) -> bool:
    """Whether a logarithmic axis shows all that a linear one would, and more: no zeros, and a factor of ten or more."""
    values = [value for curve in curves for value in curve.y if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) >= 10 * min(values)
