"""Statistics within an example."""

from __future__ import annotations

from case import Case

ROWS: list[Case] = []
