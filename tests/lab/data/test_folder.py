import sys
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from normkit.errors import ArgumentError, MissingExtraError
from normkit.lab.data import DataError, DataSet, FolderSet, Share, load, load_any
from normkit.lab.data.crops import Crop
from normkit.lab.data.image_files import read_crops

COLOURS = {"blue": (20, 40, 220), "green": (30, 200, 60), "red": (210, 30, 10)}


def draw(path, size, colour, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def photographs(tmp_path):
    """Images of all sizes, of the colour that their class is named after."""
    random = np.random.default_rng(0)
    for part, count in (("train", 7), ("val", 3)):
        for name, colour in COLOURS.items():
            for i in range(count):
                size = tuple(int(side) for side in random.integers(20, 200, 2))
                draw(tmp_path / "photographs" / part / name / f"{i}.{('jpg', 'png', 'JPEG')[i % 3]}", size, colour)
    (tmp_path / "photographs" / "train" / "red" / "notes.txt").write_text("no image")
    (tmp_path / "photographs" / "train" / ".hidden").mkdir()
    return tmp_path / "photographs"


@pytest.fixture
def stamps(tmp_path):
    """Small images of one size."""
    random = np.random.default_rng(1)
    pixels = {}
    for part in ("train", "test"):
        for name in ("a", "b"):
            for i in range(4):
                path = tmp_path / "stamps" / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels[part, name, i] = random.integers(0, 256, (9, 11, 3), np.uint8)
                Image.fromarray(pixels[part, name, i]).save(path)
    return tmp_path / "stamps", pixels


def shows_its_class(x, y):
    wanted = torch.tensor(list(COLOURS.values()))[y] / 255
    return (x.mean((-2, -1)) - wanted).abs().max() < 0.03


def test_training_batches(photographs):
    folder = FolderSet(photographs, pixels=24, workers=3)
    assert folder.classes == ("blue", "green", "red")
    assert len(folder.train.files) == 21
    for x, y in islice(folder.train_batches(5, seed=1), 9):
        assert (x.shape, x.dtype, y.dtype) == ((5, 3, 24, 24), torch.float32, torch.int64)
        assert shows_its_class(x, y)


@pytest.mark.parametrize("start", [0, 1, 4, 9])
def test_going_on_yields_what_would_have_come_with_any_number_of_threads(photographs, start):
    unbroken = list(islice(FolderSet(photographs, 16, workers=1).train_batches(5, 7), start + 3))
    resumed = list(islice(FolderSet(photographs, 16, workers=4).train_batches(5, 7, start), 3))
    for (x, y), (u, v) in zip(unbroken[start:], resumed, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def test_an_epoch_shows_no_image_twice_and_seeds_differ(photographs):
    folder = FolderSet(photographs, 8)
    labels = [torch.cat([y for _, y in islice(folder.train_batches(7, seed), 3)]) for seed in (0, 1)]
    assert [y.bincount().tolist() for y in labels] == [[7, 7, 7]] * 2
    assert not torch.equal(*labels)


@pytest.mark.parametrize(("crops", "shape"), [(1, ()), (10, (10,)), (144, (144,))])
def test_test_batches(photographs, crops, shape):
    found = list(FolderSet(photographs, 12).test_batches(4, crops))
    assert [x.shape for x, _ in found] == [(n, *shape, 3, 12, 12) for n in (4, 4, 1)]
    assert torch.cat([y for _, y in found]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for x, y in found:
        assert shows_its_class(x if crops == 1 else x.mean(1), y)


def test_a_crop_is_the_part_that_it_says(tmp_path):
    left_to_right = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (100, 1, 3))
    Image.fromarray(left_to_right).save(tmp_path / "ramp.png")
    crops = [Crop((40.0, 0.0, 80.0, 40.0), False), Crop((40.0, 60.0, 80.0, 100.0), True)]
    plain, mirrored = read_crops(tmp_path / "ramp.png", lambda width, height: crops, 40)
    assert plain[0, 0].tolist() == list(range(40, 80))
    assert torch.equal(mirrored, plain.flip(-1))


def test_a_large_jpeg_is_decoded_smaller_to_the_same_picture(tmp_path):
    ramp = np.add.outer(np.arange(800) / 8, np.arange(1600) / 16).astype(np.uint8)
    image = Image.fromarray(np.stack([ramp] * 3, -1))
    image.save(tmp_path / "a.jpg", quality=95)
    image.save(tmp_path / "a.png")
    choose = lambda width, height: [Crop((width * 0.25, 0.0, width * 0.75, float(height)), False)]  # noqa: E731
    jpeg, png = (read_crops(tmp_path / name, choose, 50).int() for name in ("a.jpg", "a.png"))
    assert (jpeg - png).abs().max() <= 2


def test_small_images_become_a_set_in_memory(stamps):
    path, pixels = stamps
    found = load(str(path))
    assert isinstance(found, DataSet)
    assert found.classes == ("a", "b")
    assert load(str(path)) is found
    for part, images in (("train", found.train), ("test", found.test)):
        assert images.labels.tolist() == [0] * 4 + [1] * 4
        expected = np.stack([pixels[part, name, i] for name in ("a", "b") for i in range(4)])
        np.testing.assert_array_equal(images.pixels.numpy(), expected.transpose(0, 3, 1, 2))


def test_grey_images_have_one_channel(tmp_path):
    for part in ("train", "val"):
        for shade, name in ((10, "dark"), (200, "light")):
            draw(tmp_path / part / name / "1.png", (5, 4), (shade,) * 3, mode="L")
    found = load(str(tmp_path))
    assert found.train.pixels.shape == (2, 1, 4, 5)
    assert found.test.pixels[:, 0, 0, 0].tolist() == [10, 200]


def test_larger_images_are_read_as_needed(photographs):
    assert isinstance(load_any(str(photographs)), FolderSet)
    with pytest.raises(ArgumentError, match=r"of one size, of at most 64x64; those in .*photographs are larger"):
        load(str(photographs))


def test_a_folder_by_a_relative_path(stamps, monkeypatch):
    monkeypatch.chdir(stamps[0].parent)
    assert load("stamps").classes == load("./stamps").classes == ("a", "b")


# ---- what is wrong with a folder


def break_image(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_a_truncated_image_is_named(stamps):
    break_image(stamps[0] / "test" / "b" / "2.png")
    with pytest.raises(DataError, match=r"test/b/2\.png is not an image that can be read: .*Replace it"):
        load(str(stamps[0]))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xe0 half a jpeg"])
def test_a_broken_image_is_named_by_the_threads(photographs, content):
    (photographs / "train" / "red" / "0.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"train/red/0\.jpg is not an image"):
        list(islice(FolderSet(photographs, 8).train_batches(3, 0), 7))


def test_sixteen_bits_are_not_cut_to_eight(stamps):
    Image.fromarray(np.full((9, 11), 1000, np.uint16)).save(stamps[0] / "train" / "a" / "0.png")
    with pytest.raises(DataError, match=r"train/a/0\.png needs 8 bits per colour; it has mode 'I;16'"):
        load(str(stamps[0]))


def remove(path):
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: [remove(p / part / "b") for part in ("train", "test")], "train needs two classes .* got only a"),
        (lambda p: [f.unlink() for f in (p / "train" / "b").iterdir()], "train/b needs images .*; it has none"),
        (lambda p: [remove(p / "train" / name) for name in "ab"], "train needs a folder of images for each class"),
        (lambda p: remove(p / "test" / "b"), "same classes in train and test; only one of them has b"),
        (lambda p: (p / "test").rename(p / "other"), "val/CLASS.* or test/CLASS.*stamps has no val"),
        (lambda p: p.rename(p.parent / "elsewhere"), "stamps is not a folder"),
    ],
)
def test_a_folder_that_is_no_set(stamps, change, message):
    change(stamps[0])
    with pytest.raises(DataError, match=message):
        load(str(stamps[0]))


def test_without_pillow(stamps, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"needs Pillow.*pip install 'normkit\[lab\]'"):
        load(str(stamps[0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: FolderSet(p, pixels=0), "got 0 and None"),
        (lambda p: FolderSet(p, workers=0), "got 224 and 0"),
        (lambda p: FolderSet(p).train_batches(22, 0), "from 1 to 21 images, .*; got 22"),
        (lambda p: FolderSet(p).test_batches(0), "1 or more images; got 0"),
        (lambda p: FolderSet(p).test_batches(1, crops=2), "crops needs to be 1, 10 or 144; got 2"),
    ],
)
def test_what_cannot_be_is_told_at_once(photographs, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(photographs)


@pytest.mark.parametrize("ranks", [2, 6])
def test_the_shares_of_ranks_are_the_batch(ranks, photographs):
    """With six ranks and five images one has none."""
    folder = FolderSet(photographs, 16, workers=2)
    whole = list(islice(folder.train_batches(5, 7, 2), 3))
    parts = [list(islice(folder.train_batches(5, 7, 2, Share(rank, ranks)), 3)) for rank in range(ranks)]
    for step, (x, y) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), x)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), y)
