"""The colours of the report's stylesheet, for what is drawn without a browser."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

RGBA = tuple[int, int, int, int]


@cache
def light_properties() -> dict[str, str]:
    """The stylesheet's custom properties as they are on a light page, by their names without the dashes."""
    css = resources.files("normkit.figures").joinpath("static", "report.css").read_text(encoding="utf-8")
    block = css[css.index(":root {") : css.index("}")]
    return dict(re.findall(r"--([\w-]+):\s*([^;]+);", block))


def light_colour(name: str, alpha: float = 1.0) -> RGBA:
    """A colour of the light page, such as "ink" or "c0"."""
    text = light_properties()[name]
    red, green, blue = (int(text[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue, round(255 * alpha)


def band_alpha() -> float:
    """How opaque the range over seeds is."""
    return float(light_properties()["band"])
