"""Texts fit, in the characters that the font has."""

import pytest

from normkit.figures.lettering import ELLIPSIS, drawable, elided, font_of, wrapped

LONG = "backbone.stages.3.blocks.11.attention.projection.norm"


def test_a_long_name_loses_its_middle_and_keeps_its_ends():
    font = font_of(20)
    text = elided(LONG, font, 200)
    head, tail = text.split(ELLIPSIS)
    assert LONG.startswith(head)
    assert LONG.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1
    assert 150 < font.width(text) <= 200
    assert elided("short", font, 200) == "short"


def test_lines_break_between_words_and_fit():
    font = font_of(16)
    text = f"some words and {LONG} and again some words"
    lines = wrapped(text, font, 160)
    assert all(font.width(line) <= 160 for line in lines)
    assert lines[0] == "some words and"
    assert ELLIPSIS in lines[1]
    assert wrapped("", font, 160) == []


def test_letters_grow_with_their_size():
    assert font_of(40).height == pytest.approx(2 * font_of(20).height, abs=2)
    assert font_of(40).width("name") == pytest.approx(2 * font_of(20).width("name"), rel=0.1)


def test_characters_that_the_font_lacks_are_replaced():
    assert drawable("Größe ×5\n\N{MINUS SIGN}1 中") == "Gro?e x5 -1 ?"  # noqa: RUF001, as names may be
    face = font_of(20).face
    missing = bytes(face.getmask("\ue000"))
    every = drawable("".join(map(chr, range(32, 0x250))) + "×–∞µ…·")  # noqa: RUF001
    assert [c for c in set(every) - {" "} if bytes(face.getmask(c)) == missing] == []
