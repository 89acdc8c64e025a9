import hashlib
import lzma
from collections import Counter
from pathlib import Path

import pytest
import torch

from make_moby_mini import CHAPTERS, choose, compress
from normkit.errors import ArgumentError
from normkit.lab.data import DataError, TextSet, available, get, is_text, load, load_text
from normkit.lab.data.texts import MOBY_MINI, SHORTEST, text_set, unpack

PACKED = "cd7acddc2ca9324c50d42857112df8ef89059fe7ad8139e449bdd77a6889ae32"


def characters(found):
    return "".join(found.alphabet[place] for place in torch.cat([found.train, found.test]).tolist())


def test_it_is_the_file_that_was_made():
    packed = MOBY_MINI.path.read_bytes()
    assert hashlib.sha256(packed).hexdigest() == PACKED
    content = lzma.decompress(packed)
    assert (len(content), hashlib.sha256(content).hexdigest()) == (MOBY_MINI.size, MOBY_MINI.sha256)
    notice = (MOBY_MINI.path.parent / "MOBY-DICK-NOTICE").read_text("utf-8")
    assert "Herman Melville" in notice
    assert "in the public domain" in notice


def test_what_it_holds():
    found = load_text("moby-mini")
    assert load_text("moby-mini") is found
    text = characters(found)
    assert text == unpack(MOBY_MINI)
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert [line.split(".")[0] for line in text.split("\n") if line.startswith("CHAPTER ")] == [
        f"CHAPTER {number}" for number in range(1, 49)
    ]
    assert "gutenberg" not in text.lower()
    assert f"{len(text):,} characters" in MOBY_MINI.what


def test_the_last_tenth_is_for_testing():
    found = load_text("moby-mini")
    assert len(found.test) == (len(found.train) + len(found.test)) // 10 == 47_282
    assert (found.train.dtype, found.test.dtype) == (torch.int64, torch.int64)


def test_an_alphabet_has_every_character_once_and_in_order():
    text = "çab 🐋\nba" * 3
    found = text_set("own", text)
    assert found.alphabet == "".join(sorted(Counter(text)))
    assert characters(found) == text
    assert (len(found.train), len(found.test)) == (len(text) - len(text) // 10, len(text) // 10)


def test_it_is_listed_and_there():
    (entry,) = [entry for entry in available() if entry.name == "moby-mini"]
    assert (entry.where, entry.size) == (str(MOBY_MINI.path), MOBY_MINI.size)
    assert get("moby-mini") == MOBY_MINI.path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1000], "cannot be read: .* Install normkit anew"),
        (lambda b: b"", "cannot be read"),
        (lambda b: lzma.compress(b"another text"), "needs the text with sha256 .* Install normkit anew"),
    ],
)
def test_a_damaged_installation_is_told(tmp_path, damage, message):
    path = tmp_path / "text.xz"
    path.write_bytes(damage(MOBY_MINI.path.read_bytes()))
    with pytest.raises(DataError, match=message):
        unpack(MOBY_MINI._replace(path=path))


def test_it_is_made_of_chapters_in_order(tmp_path, pack):
    chapters = {f"chapter_{number}.txt": f"{number}\n".encode() for number in reversed(range(1, CHAPTERS + 3))}
    content = choose(pack(tmp_path / "x.tgz", chapters, below="package/data"))
    assert content.decode().split("\n\n") == [*map(str, range(1, CHAPTERS)), f"{CHAPTERS}\n"]
    assert lzma.decompress(compress(content)) == content


# ---- a file of one's own


LINES = "Über das Meer.\n" * (SHORTEST // 15 + 1)


@pytest.mark.parametrize("spelling", ["./own.txt", "own.txt", "~/own.txt"])
def test_a_file(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("own.txt").write_text(LINES, "utf-8")
    found = load_text(spelling)
    assert isinstance(found, TextSet)
    assert found.name == spelling
    assert characters(found) == LINES.removesuffix("\n")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_lines_end_alike_and_a_mark_of_the_encoding_is_left_out(tmp_path, start, end):
    path = tmp_path / "own.txt"
    path.write_bytes(start + LINES.replace("\n", end).encode())
    assert characters(load_text(str(path))) == LINES.removesuffix("\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Call me Ishmael.", r"own\.txt needs 10,000 characters or more; it has 16\. Take a longer text"),
        (b"", "it has 0"),
        (LINES.encode("latin-1"), r"own\.txt needs to be text in UTF-8; its byte 0 is not\. Save it"),
        (b"a" * 20_000 + b"\xff", "its byte 20000 is not"),
    ],
)
def test_a_file_that_will_not_do(tmp_path, content, message):
    path = tmp_path / "own.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_text(str(path))


def test_what_is_not_a_file_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(DataError, match=r"A text needs a file that can be read; got .*:"):
            load_text(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moby_mini", "needs the name moby-mini, or the path .* got 'moby_mini'. Did you mean \"moby-mini\""),
        ("none.txt", "of a file that is there; got 'none.txt'"),
        ("fashion-mini", "got 'fashion-mini'"),
    ],
)
def test_a_name_of_no_text(name, message):
    with pytest.raises(ArgumentError, match=message):
        load_text(name)


def test_a_text_is_no_set_of_images():
    with pytest.raises(ArgumentError, match=r"A set of images is needed, one of fashion-mini, .*; moby-mini is a text"):
        load("moby-mini")


def test_texts_are_told_from_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("a text")
    Path("mnist").write_text("a file with the name of a set")
    Path("images").mkdir()
    names = ("moby-mini", "own.txt", str(tmp_path / "own.txt"), "mnist", "images", "none.txt", "fashion-mini")
    assert [is_text(name) for name in names] == [True, True, True, False, False, False, False]
