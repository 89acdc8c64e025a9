"""Where the parts of an image lie: title, axes, curves and, below them all, the legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from normkit.figures.drawing import Key, Style, keys
from normkit.figures.figure import Curve, Figure
from normkit.figures.lettering import Font, elided, font_of, wrapped
from normkit.figures.scale import Scale, Tick, scale_of, ticks

OVERSAMPLING = 2  # an image is drawn so many times larger, and then reduced, so that lines are smooth
_LETTERS = 42  # a line of an image holds about twice as many
_SMALLEST = 12  # pixels of a letter that is read without effort
_PROPORTION = 0.5  # the height of the curves over the width of the image


class Box(NamedTuple):
    """A rectangle, in pixels from the upper left corner."""

    left: int
    top: int
    right: int
    bottom: int


class Placed(NamedTuple):
    """A text at a point; the anchor is Pillow's word for which point of it that is."""

    text: str
    at: tuple[float, float]
    anchor: str
    font: Font
    colour: str


class Entry(NamedTuple):
    """A line of the legend: the box is that of its sample of the curve."""

    key: Key
    sample: Box


class Arrangement(NamedTuple):
    """An image before it is drawn, in pixels before it is reduced."""

    width: int
    height: int
    unit: int  # the size of letters, which all other sizes follow
    x: Scale
    y: Scale
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    plot: Box
    legend: Box
    entries: list[Entry]
    texts: list[Placed]

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of a curve is drawn."""
        box = self.plot
        across, up = self.x.place(x), self.y.place(y)
        return box.left + across * (box.right - box.left), box.bottom - up * (box.bottom - box.top)


class _Column:
    """Texts one below the other."""

    def __init__(self, left: int, width: int, top: int) -> None:
        self.left, self.width, self.top = left, width, top
        self.texts: list[Placed] = []

    def add(self, text: str, font: Font, colour: str, gap: int = 0, anchor: str = "la") -> None:
        """Put a text below what is there, in as many lines as it needs."""
        for line in wrapped(text, font, self.width):
            self.texts.append(Placed(line, (self.left, self.top), anchor, font, colour))
            self.top += font.height
        self.top += gap if text else 0


def arrange(figure: Figure, width: int, style: dict[str, Style]) -> Arrangement:
    """Lay out a figure as an image of this width, as high as it needs to be."""
    full = OVERSAMPLING * width
    unit = OVERSAMPLING * max(_SMALLEST, round(width / _LETTERS))
    small, large = font_of(unit), font_of(round(1.2 * unit))
    x, y = _scales(figure)
    head = _Column(unit, full - 2 * unit, unit)
    head.add(figure.title, large, "ink", unit // 4)
    head.add(figure.note, small, "soft", unit // 4)
    head.top += unit // 4
    head.add(figure.y_title, small, "soft", unit // 2)
    y_ticks = ticks(y, 8 if figure.log_y else 6)
    plot = _plot_box(full, unit, head.top, small, y_ticks)
    x_ticks = _x_ticks(figure, x, small, plot)
    foot = _foot(figure.x_title, small, plot, unit)
    legend = Box(unit, foot.top + unit // 2, full - unit, foot.top + unit // 2)
    entries, names, bottom = _legend(keys(figure, style), legend, small, unit)
    height = bottom + unit + (bottom + unit) % OVERSAMPLING
    texts = [*head.texts, *foot.texts, *names]
    found = Arrangement(
        full, height, unit, x, y, x_ticks, y_ticks, plot, legend._replace(bottom=bottom), entries, texts
    )
    return found._replace(texts=[*texts, *_tick_texts(found, small)])


def _foot(title: str, font: Font, plot: Box, unit: int) -> _Column:
    """The title of the lower axis, below its labels and in its middle."""
    column = _Column((plot.left + plot.right) // 2, plot.right - plot.left, plot.bottom + unit // 2 + font.height)
    column.add(title, font, "soft", anchor="ma")
    return column


def _scales(figure: Figure) -> tuple[Scale, Scale]:
    xs = [x for curve in figure.curves for x in curve.x]
    return scale_of(xs, figure.log_x, 0.02), scale_of(_heights(figure.curves), figure.log_y, 0.06)


def _heights(curves: Sequence[Curve]) -> Iterator[float]:
    """All values that must find a place, those of ranges too."""
    for curve in curves:
        yield from (*curve.y, *(curve.low or ()), *(curve.high or ()))


def _plot_box(full: int, unit: int, top: int, font: Font, y_ticks: Sequence[Tick]) -> Box:
    labels = max((font.width(text) for _, text in y_ticks), default=0.0)
    return Box(unit + round(labels) + unit // 2, top, full - 2 * unit, top + round(_PROPORTION * full))


def _x_ticks(figure: Figure, scale: Scale, font: Font, plot: Box) -> list[Tick]:
    """As many as stand beside each other with room between them."""
    is_whole = all(float(x).is_integer() for curve in figure.curves for x in curve.x)
    found: list[Tick] = []
    for most in range(8, 0, -1):
        found = ticks(scale, most, is_whole=is_whole)
        if sum(font.width(text) + font.height for _, text in found) <= plot.right - plot.left:
            break
    return found


def _tick_texts(of: Arrangement, font: Font) -> Iterator[Placed]:
    for value, text in of.x_ticks:
        at = of.point(value, of.y.low)
        yield Placed(text, (at[0], at[1] + of.unit // 2), "ma", font, "soft")
    for value, text in of.y_ticks:
        at = of.point(of.x.low, value)
        yield Placed(text, (at[0] - of.unit // 2, at[1]), "rm", font, "soft")


def _legend(keys: Sequence[Key], box: Box, font: Font, unit: int) -> tuple[list[Entry], list[Placed], int]:
    """Names beside samples of their curves, in rows; also where the last row ends."""
    entries: list[Entry] = []
    names: list[Placed] = []
    left, top, row, sample = box.left, box.top, round(1.1 * font.height), 2 * unit
    for key in keys:
        room = box.right - box.left - sample - unit // 2
        text = elided(f"{key.label} ({key.ends})" if key.ends else key.label, font, room)
        size = sample + unit // 2 + round(font.width(text))
        if left > box.left and left + size > box.right:
            left, top = box.left, top + row
        entries.append(Entry(key, Box(left, top, left + sample, top + row)))
        names.append(Placed(text, (left + sample + unit // 2, top + row / 2), "lm", font, "ink"))
        left += size + unit
    return entries, names, top + row if keys else top
