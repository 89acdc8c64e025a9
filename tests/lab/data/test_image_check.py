"""A folder of images is looked at before anything is trained: every broken file is found, and the first are named."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from normkit.lab.data import DataError, FolderSet, image_check, load
from normkit.lab.data.image_check import check_images
from normkit.lab.data.image_files import check_image

FORMATS = ["jpg", "png", "gif", "bmp", "webp", "ppm", "tif"]


def photograph(path, size=(60, 40)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sum(map(ord, path.name))).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                photograph(tmp_path / part / name / f"{i}.{FORMATS[i]}")
    return tmp_path


@pytest.mark.parametrize("ending", FORMATS)
def test_a_whole_file_is_fine(tmp_path, ending):
    size, mode = check_image(photograph(tmp_path / f"a.{ending}"))
    assert size == (60, 40)
    assert mode in ("RGB", "P")


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.3, 0.7, 0.97])
def test_a_file_that_is_cut_off_is_found(tmp_path, ending, kept):
    path = photograph(tmp_path / f"a.{ending}")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=rf"a\.{ending} is not an image that can be read: .*Replace it"):
        check_image(path)


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_what_follows_the_end_does_no_harm(tmp_path, ending):
    """Cameras append to their files; then all of it is decoded to see whether it is there."""
    path = photograph(tmp_path / f"a.{ending}")
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 50)
    assert check_image(path)[0] == (60, 40)
    path.write_bytes(content[:-200] + b"\0" * 50)
    with pytest.raises(DataError, match="is not an image"):
        check_image(path)


def test_a_set_with_a_broken_file_is_refused_when_it_is_opened(folder):
    path = folder / "train" / "dog" / "0.jpg"
    path.write_bytes(path.read_bytes()[:-30])
    for open_it in (FolderSet, lambda path: load(str(path))):
        with pytest.raises(DataError, match=r"train/dog/0\.jpg is not an image that can be read: "):
            open_it(folder)


def test_the_first_of_many_are_named(folder):
    broken = sorted((folder / "train" / "cat").iterdir()) + sorted((folder / "val" / "dog").iterdir())
    for path in broken:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError) as error:
        FolderSet(folder, workers=3)
    first, *lines = str(error.value).splitlines()
    assert first == "8 of 16 images cannot be used:"
    assert [str(path) in line for path, line in zip(broken[:5], lines[:5], strict=True)] == [True] * 5
    assert lines[5:] == ["  and 3 more"]


def test_a_bar_for_many_files(folder, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(image_check, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    files = sorted((folder / "train" / "cat").iterdir())
    check_images(files, 2)
    assert screen.getvalue() == ""
    monkeypatch.setattr(image_check, "LARGE", 5)
    monkeypatch.setattr(image_check, "AT_ONCE", 4)
    check_images(files, 2)
    assert "6/6" in screen.getvalue()
