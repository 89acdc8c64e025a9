"""Tables, curves and pictures, as data. Pages, images and terminals draw them and add nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns; None is a cell without a value."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """A line through points, with the range over seeds where there are several."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_published: bool = False  # read from a paper, not measured here

    def above(self, floor: float) -> Curve:
        """The points from this height on."""
        kept = [i for i, y in enumerate(self.y) if y >= floor]

        def of(values: Sequence[float]) -> list[float]:
            return [values[i] for i in kept]

        low, high = (None if values is None else of(values) for values in (self.low, self.high))
        return replace(self, x=of(self.x), y=of(self.y), low=low, high=high)


@dataclass(frozen=True)
class Figure:
    """Curves over common axes."""

    title: str
    x_title: str
    y_title: str
    curves: Sequence[Curve]
    note: str = ""
    log_x: bool = False  # of positive values that span decades
    log_y: bool = False

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        from normkit.figures.png import png_bytes  # not above: what draws figures knows what they are

        return png_bytes([self])


@dataclass(frozen=True)
class Pictures:
    """Named rows of images, each the text that `pictures.row_of` makes of pixels. Only pages show them."""

    title: str
    rows: Sequence[tuple[str, str]]
    note: str = ""
