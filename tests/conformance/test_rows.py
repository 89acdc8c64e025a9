from torch import nn

import normkit as nk
from support.cases import CASES


def test_every_layer_has_a_row():
    layers = {name for name in nk.layers.__all__ if isinstance(getattr(nk.layers, name), type)}
    assert layers == {case.name for case in CASES}


def test_every_row_is_named_once():
    names = [str(case) for case in CASES]
    assert len(names) == len(set(names))


def test_every_layer_is_public_in_both_places():
    for name in nk.layers.__all__:
        assert getattr(nk, name) is getattr(nk.layers, name)
        assert name in nk.__all__


def test_rows_build_what_they_name():
    for case in CASES:
        layer = case.build()
        assert type(layer).__name__ == case.name
        assert isinstance(layer, nn.Module)


def test_every_layer_is_described():
    for case in CASES:
        assert nk.describe(case.build()) is not None, case
