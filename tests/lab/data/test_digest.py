from dataclasses import replace

import torch
from PIL import Image

from normkit.lab.data import FolderSet, load, load_text
from normkit.lab.data.digest import digest_of


def test_a_pixel_a_label_and_a_letter_count():
    images, text = load("fashion-mini"), load_text("moby-mini")
    assert digest_of(images) == digest_of(
        replace(images, train=images.train._replace(pixels=images.train.pixels.clone()))
    )
    other = images.train.pixels.clone()
    other[-1, 0, 3, 4] += 1
    assert digest_of(replace(images, train=images.train._replace(pixels=other))) != digest_of(images)
    labels = torch.cat([images.test.labels[1:], images.test.labels[:1]])
    assert digest_of(replace(images, test=images.test._replace(labels=labels))) != digest_of(images)
    assert digest_of(replace(text, test=text.test.flip(0))) != digest_of(text)


def test_of_a_folder_names_and_sizes_count_and_not_where_it_is(tmp_path):
    def folder(name, size=90, file="1.png"):
        for part in ("train", "val"):
            for label in ("a", "b"):
                (tmp_path / name / part / label).mkdir(parents=True)
                Image.new("L", (size, 90)).save(tmp_path / name / part / label / file)
        return digest_of(FolderSet(tmp_path / name))

    one = folder("one")
    assert folder("same") == one
    assert folder("larger", size=900) != one
    assert folder("renamed", file="2.png") != one
