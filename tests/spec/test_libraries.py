"""The norm classes of transformers and timm: how many are recognized, and that none is taken for what it is not."""

from collections import Counter

import pytest

import normkit as nk
from norm_classes import judged

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]  # of the libraries


def shares(found):
    """By what the classes are called, how many there are, and how many are right."""
    look_alikes = [one for one in found if one.family != "other"]
    assert [one for one in found if one.outcome == "wrong"] == []
    right = [one for one in look_alikes if one.outcome == "right"]
    return Counter(one.family for one in look_alikes), len(right) / len(look_alikes)


def test_transformers():
    pytest.importorskip("transformers")
    count, share = shares(judged("transformers"))
    assert count["RMSNorm"] > 150
    assert count["LayerNorm"] > 30
    assert share >= 0.95


def test_timm():
    from support import aside  # noqa: F401  # where timm is

    pytest.importorskip("timm")
    count, share = shares(judged("timm"))
    assert count["RMSNorm"] >= 4
    assert count["LayerNorm"] >= 7
    assert share >= 0.95


def test_torchvision():
    from support import aside  # noqa: F401  # where torchvision is

    pytest.importorskip("torchvision")
    from torchvision.models.convnext import LayerNorm2d
    from torchvision.ops import FrozenBatchNorm2d

    of_maps = nk.describe(LayerNorm2d(24, eps=1e-6))
    assert (of_maps.kind, of_maps.channels_first, of_maps.num_features, of_maps.eps) == ("layer", True, 24, 1e-6)
    frozen = nk.describe(FrozenBatchNorm2d(24))
    assert (frozen.kind, frozen.uses, frozen.num_features) == ("batch", "stored", 24)
