import hashlib
from pathlib import Path

import pytest
import torch

from make_fashion_mini import choose
from normkit.lab.data import DataError, cache, get, load
from normkit.lab.data.cache import EMBEDDED, pack_mini, read_stored, unpack_mini
from normkit.lab.data.catalogue import FASHION_MINI, FASHION_MNIST
from normkit.lab.data.fetch import decode_path

PACKED = "79025bb058e226a14723659f467bc199d8cc72ddda55f6704575ad8e12be4f14"


def test_it_is_the_file_that_was_made():
    packed = EMBEDDED.read_bytes()
    assert hashlib.sha256(packed).hexdigest() == PACKED
    assert hashlib.sha256(unpack_mini(packed)).hexdigest() == FASHION_MINI.sha256
    assert len(packed) < 4.5e6
    assert "Copyright © 2017 Zalando SE" in (EMBEDDED.parent / "FASHION-MNIST-LICENSE").read_text("utf-8")


def test_what_it_holds():
    mini = load("fashion-mini")
    assert load("fashion-mini") is mini
    assert mini.classes[9] == "Ankle boot"
    for images, each in ((mini.train, 1000), (mini.test, 200)):
        assert images.pixels.shape == (10 * each, 1, 28, 28)
        assert (images.pixels.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
        assert images.labels.bincount().tolist() == [each] * 10
        assert (images.pixels.flatten(1).sum(1) > 0).all()
    assert len(mini.train.pixels.flatten(1).unique(dim=0)) > 9_990  # images, and not one image
    # Trousers stand upright: rows and columns were not left swapped.
    trousers = mini.train.pixels[mini.train.labels == 1].float().mean((0, 1))
    assert (trousers.mean(1) > 10).sum() > 1.5 * (trousers.mean(0) > 10).sum()


def test_packing_loses_nothing():
    content = torch.randint(256, (FASHION_MINI.size,), dtype=torch.uint8).numpy()
    content[1000:] = 7  # the more there is to compress, the longer it takes
    assert (unpack_mini(pack_mini(content)) == content).all()


def test_get_has_nothing_to_do():
    assert get("fashion-mini") == EMBEDDED


@pytest.mark.parametrize("damage", [lambda b: b[:-1000], lambda b: b[:9999] + b"\0" + b[10000:], lambda b: b""])
def test_a_damaged_installation_is_told(monkeypatch, tmp_path, damage):
    path = tmp_path / "mini.xz"
    path.write_bytes(damage(EMBEDDED.read_bytes()))
    monkeypatch.setattr(cache, "EMBEDDED", path)
    with pytest.raises(DataError, match=r"fashion-mini needs .*mini\.xz; it cannot be read"):
        read_stored(FASHION_MINI)


def test_it_can_be_made_again():
    full = decode_path(FASHION_MNIST, Path(FASHION_MNIST.debian))
    if full is None:
        pytest.skip("needs Debian's dataset-fashion-mnist")
    assert hashlib.sha256(choose(FASHION_MNIST.data_set(full))).hexdigest() == FASHION_MINI.sha256
