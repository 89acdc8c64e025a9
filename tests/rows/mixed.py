"""Layers whose arithmetic is their own: whitening, EvoNorm, switchable and moving-average norms."""

from __future__ import annotations

from case import Case

ROWS: list[Case] = []
