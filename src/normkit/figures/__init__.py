"""Figures: curves, tables and pictures in one look, as a page that works offline, as an image, and on a terminal."""

from normkit.figures.figure import Cell, Curve, Figure, Pictures, Table
from normkit.figures.page import write_page
from normkit.figures.png import write_png, write_stack

__all__ = ["Cell", "Curve", "Figure", "Pictures", "Table", "write_page", "write_png", "write_stack"]
