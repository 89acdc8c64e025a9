"""Normalisation of weights."""

from __future__ import annotations

from case import Case

ROWS: list[Case] = []
