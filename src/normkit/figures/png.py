"""Figures as PNG images, drawn with Pillow alone, in the look of the report's light page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from normkit.atomic import replacing
from normkit.errors import ArgumentError
from normkit.figures.arrangement import OVERSAMPLING, Arrangement, Box, Entry, arrange
from normkit.figures.drawing import Style, styles
from normkit.figures.figure import Curve, Figure
from normkit.figures.marks import Point, dashes, symbol_shape
from normkit.figures.palette import RGBA, band_alpha, light_colour
from normkit.figures.scale import is_shown
from normkit.optional import required

_NARROWEST = 240  # pixels: below it, ticks and names have no room
_SYMBOLS = 12  # of a curve, at most


def write_png(figure: Figure, path: str | Path, width: int = 800) -> Path:
    """Write a figure as an image of this width, in pixels; its height follows from what it shows."""
    return write_stack([figure], path, width)


def write_stack(figures: Sequence[Figure], path: str | Path, width: int = 800) -> Path:
    """Write figures as one image, one below the other; a name has one colour in all of them."""
    path = Path(path)
    content = png_bytes(figures, width)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(content)
    return path


def png_bytes(figures: Sequence[Figure], width: int = 800) -> bytes:
    """The image of `write_stack`, as a file's content."""
    if not figures or type(width) is not int or width < _NARROWEST:
        raise ArgumentError(
            f"an image needs a figure and a width of {_NARROWEST} pixels or more; got {len(figures)} figures and "
            f"{width!r}."
        )
    style = styles(figures)
    images = [_image(arrange(figure, width, style), figure, style) for figure in figures]
    buffer = io.BytesIO()
    _stacked(images).save(buffer, format="PNG")
    return buffer.getvalue()


def _stacked(images: Sequence[Any]) -> Any:
    pillow = required("PIL.Image", "An image", "pillow")
    whole = pillow.new("RGB", (images[0].width, sum(image.height for image in images)))
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    return whole


def _image(plan: Arrangement, figure: Figure, style: dict[str, Style]) -> Any:
    pillow = required("PIL.Image", "An image", "pillow")
    image = pillow.new("RGB", (plan.width, plan.height), light_colour("ground")[:3])
    pen = required("PIL.ImageDraw", "An image", "pillow").Draw(image, "RGBA")  # which lets bands shine through
    _draw_axes(pen, plan)
    for curve in figure.curves:
        _draw_band(pen, plan, curve, light_colour(f"c{style[curve.name].colour}", band_alpha()))
    for curve in figure.curves:
        _draw_curve(pen, plan, curve, style[curve.name])
    for entry in plan.entries:
        _draw_sample(pen, plan, entry)
    for text in plan.texts:
        pen.text(text.at, text.text, font=text.font.face, anchor=text.anchor, fill=light_colour(text.colour))
    return image.reduce(OVERSAMPLING)


def _draw_axes(pen: Any, plan: Arrangement) -> None:
    box, thin = plan.plot, max(2, plan.unit // 16)
    for value, _ in plan.y_ticks:
        height = plan.point(plan.x.low, value)[1]
        pen.line([(box.left, height), (box.right, height)], light_colour("grid"), thin)
    for value, _ in plan.x_ticks:
        across = plan.point(value, plan.y.low)[0]
        pen.line([(across, box.bottom), (across, box.bottom + plan.unit // 3)], light_colour("rule"), thin)
    pen.line([(box.left, box.bottom), (box.right, box.bottom)], light_colour("rule"), thin)


def _draw_band(pen: Any, plan: Arrangement, curve: Curve, colour: RGBA) -> None:
    """The range: a closed shape for each stretch without a gap."""
    if curve.low is None or curve.high is None:
        return
    lows = _stretches(plan, curve.x, curve.low, curve.high)
    highs = _stretches(plan, curve.x, curve.high, curve.low)
    for low, high in zip(lows, highs, strict=True):
        if len(low) > 1:
            pen.polygon([*high, *reversed(low)], fill=colour)


def _draw_curve(pen: Any, plan: Arrangement, curve: Curve, style: Style) -> None:
    colour = light_colour(f"c{style.colour}")
    stretches = list(_stretches(plan, curve.x, curve.y))
    for points in stretches:
        _draw_line(pen, plan.unit, points, colour, curve.is_published)
    every = [point for points in stretches for point in points]
    step = -(-len(every) // _SYMBOLS) or 1
    alone = [points[0] for points in stretches if len(points) == 1]  # no line shows them
    for point in alone if curve.is_published else dict.fromkeys([*every[::step], *alone]):
        pen.polygon(symbol_shape(style.symbol, point, plan.unit / 4), fill=colour)


def _draw_line(pen: Any, unit: int, points: Sequence[Point], colour: RGBA, is_dashed: bool) -> None:
    thick = max(4, unit // 7)
    for line in dashes(points, 0.6 * unit, 0.4 * unit) if is_dashed else [points]:
        if len(line) > 1:
            pen.line(list(line), colour, thick, joint="curve")


def _draw_sample(pen: Any, plan: Arrangement, entry: Entry) -> None:
    """A piece of the curve beside its name."""
    key, box = entry.key, entry.sample
    middle = (box.top + box.bottom) / 2
    colour = light_colour(f"c{key.style.colour}")
    if key.has_range:
        half = plan.unit / 3
        pen.rectangle(
            [box.left, middle - half, box.right, middle + half], fill=(*colour[:3], round(255 * band_alpha()))
        )
    _draw_line(pen, plan.unit, [(box.left, middle), (box.right, middle)], colour, key.is_published)
    if not key.is_published:
        pen.polygon(symbol_shape(key.style.symbol, (_middle(box), middle), plan.unit / 4), fill=colour)


def _middle(box: Box) -> float:
    return (box.left + box.right) / 2


def _stretches(
    plan: Arrangement, xs: Sequence[float], ys: Sequence[float], also: Sequence[float] | None = None
) -> Iterator[list[Point]]:
    """Points of a curve as they are drawn, cut where a value cannot be shown, or its partner in `also` cannot."""
    points: list[Point] = []
    for x, y, other in zip(xs, ys, ys if also is None else also, strict=True):
        if is_shown(x, plan.x.is_log) and is_shown(y, plan.y.is_log) and is_shown(other, plan.y.is_log):
            points.append(plan.point(x, y))
        elif points:
            yield points
            points = []
    if points:
        yield points
