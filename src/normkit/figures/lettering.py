"""Texts in images: which characters there are, where lines break, and what becomes of names that are too long."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from typing import Any, NamedTuple

from normkit.optional import required

ELLIPSIS = "…"
_STANDING_IN = {"–": "-", "—": "-", "−": "-", "×": "x", "∞": "inf", "µ": "u"}  # noqa: RUF001, signs that it lacks


class Font(NamedTuple):
    """A size of Pillow's own font, which is the same on all machines."""

    face: Any
    height: int  # from one line to the next

    def width(self, text: str) -> float:
        """How wide a text is."""
        return float(self.face.getlength(text))


def font_of(size: int) -> Font:
    """The font with letters of this size, in pixels."""
    face = required("PIL.ImageFont", "An image", "pillow").load_default(size=size)
    return Font(face, round(1.15 * sum(face.getmetrics())))


def drawable(text: str) -> str:
    """A text in the characters that the font has: accents are left out, and what is unknown is a question mark."""
    return "".join(map(_drawable_character, " ".join(text.split())))


def elided(text: str, font: Font, width: float) -> str:
    """A text that fits into a width: what is too long loses its middle, since names differ at both ends."""
    text = drawable(text)
    kept = bisect_right(range(len(text) + 1), width, key=lambda kept: font.width(_without_middle(text, kept))) - 1
    return _without_middle(text, max(0, kept))


def wrapped(text: str, font: Font, width: float) -> list[str]:
    """A text in lines that fit into a width; a word that is longer is elided."""
    lines: list[str] = []
    for word in drawable(text).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(elided(word, font, width))
    return lines


def _without_middle(text: str, kept: int) -> str:
    if kept >= len(text):
        return text
    return text[: kept - kept // 2] + ELLIPSIS + text[len(text) - kept // 2 :]


def _drawable_character(character: str) -> str:
    if character.isascii() or character in (ELLIPSIS, "·"):
        return character if character.isprintable() else "?"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _STANDING_IN.get(character) or plain or "?"
