from normkit.figures.drawing import COLOURS
from normkit.figures.palette import band_alpha, light_colour, light_properties


def test_colours_are_those_of_the_light_page():
    assert light_colour("c0") == (0x17, 0x45, 0xD6, 255)
    assert light_colour("ground", 0.5) == (0xFB, 0xFB, 0xF9, 128)
    assert 0 < band_alpha() < 0.5


def test_there_is_a_colour_for_every_style():
    assert len({light_colour(f"c{i}") for i in range(COLOURS)}) == COLOURS
    assert f"c{COLOURS}" not in light_properties()
